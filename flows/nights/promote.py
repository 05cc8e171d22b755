"""`vitline model promote`: makes a night, or another pipeline, the champion that later nights are compared with."""

import time

from vitline.flows.catalog.lists import list_pipelines
from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.nights.night_record import CHAMPIONS, ChampionRecord, read_champion
from vitline.flows.nights.show import chosen_night
from vitline.infra.names import known_names_text, matching
from vitline.infra.night import night_text
from vitline.infra.records import reading
from vitline.infra.storage import PreconditionFailed, Store


def promote(root: Store, key: str, *, why: str, by: str) -> ChampionRecord:
    """The record of the new champion of its series. `key` is that of a finished pipeline, or its first characters.

    Raises ValueError for a key of no or several pipelines, one without a model or a reason that is empty, RuntimeError if somebody
    else has promoted another pipeline meanwhile.
    """
    if not why.strip():
        raise ValueError("--reason is empty; say in a sentence why this model becomes the champion.")
    every = list_pipelines(root.uri)
    keys = [record.key for record in every]
    found = matching(keys, key)
    if len(found) != 1:
        known = known_names_text(key, found or keys)
        raise ValueError(
            f"{key!r} is the key of {len(found) or 'no'} pipelines; {known} `vitline nights ls` lists those of nights."
        )
    record = every[keys.index(found[0])]
    if record.state != "finished" or record.model is None or record.model_digest is None:
        raise ValueError(
            f"{record.key} has ended as {record.state}, so it is no champion; promote a finished pipeline."
        )
    return make_champion(root, record, why=why, by=by)


def pipeline_to(root: Store, name: str, to: str) -> str:
    """The key of the pipeline that a series goes back to: that of the champion before (`before`), or of a night by its scheduled start.

    Raises ValueError if there is none.
    """
    if to != "before":
        night = chosen_night(root, to, name)
        if night.pipeline is None:
            raise ValueError(
                f"The night of {night_text(night.night)} was {night.outcome}, so it has no model; choose another with --to."
            )
        return night.pipeline
    champion = read_champion(root, name)
    if champion is None:
        raise ValueError(f"The series {name!r} has no champion; `vitline nights ls` shows its nights.")
    if champion.replaces is None:
        raise ValueError(
            f"{champion.pipeline} is the first champion of {name}, so none was before; name a night with --to."
        )
    return champion.replaces


def make_champion(root: Store, record: PipelineRecord, *, why: str, by: str) -> ChampionRecord:
    """Makes a pipeline that has published a model the champion of its series. Raises RuntimeError if somebody else has promoted
    another pipeline meanwhile."""
    assert record.model is not None
    assert record.model_digest is not None
    name = f"{CHAMPIONS}/{record.name}.json"
    data, tag = root.read_tagged_or_none(name)
    with reading(root.uri_of(name)):
        before = ChampionRecord.model_validate_json(data) if data is not None else None
    champion = ChampionRecord(
        name=record.name,
        pipeline=record.key,
        model=record.model,
        model_digest=record.model_digest,
        by=by,
        why=why.strip(),
        at=time.time(),
        replaces=before.pipeline if before else None,
        counter=before.counter + 1 if before else 1,
    )
    new = champion.model_dump_json(indent=1).encode()
    try:
        root.create_or_swap(name, new, tag)
    except PreconditionFailed as error:
        raise RuntimeError(
            f"Another champion of {record.name} was promoted at the same time. Look at it, and try again."
        ) from error
    return champion
