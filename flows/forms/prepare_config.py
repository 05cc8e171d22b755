"""A form for a preparation -> the config of a corpus, or a refusal in one sentence (ValueError). Starts nothing."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, Source
from vitline.data_prep.examples.presets import PRESETS
from vitline.data_prep.find_corpus import corpus_version, prepared_corpus
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.forms import PrepareRequest
from vitline.flows.forms.overrides import refuse_form_fields
from vitline.infra.config import replace
from vitline.infra.storage import open_store

SOURCES = get_args(get_args(Source)[0])
"""The config classes of all kinds of sources."""


def resolve_prepare(root: str, request: PrepareRequest) -> CorpusConfig:
    """The config of a corpus whose source and other corpora exist. Of a preset only `overrides` can change fields."""
    if (request.preset is None) == (request.source is None):
        raise ValueError(
            f"Both a preset, {request.preset}, and a source, {request.source}, were given: empty one of the two fields."
            if request.preset
            else "Neither a preset nor a source was given: choose a preset, or set source to the place of your images."
        )
    from vitline.data_prep.plan.leakage import splits_to_keep_out
    from vitline.data_prep.plan.plan_shards import Base

    config = _preset(request) if request.preset else _of_source(request)
    store = open_store(root)
    corpus_version(store, config)  # raises if the source, the class map or a named corpus does not exist
    for name in config.recipe.decontaminate:
        splits_to_keep_out(name, prepared_corpus(store, name).manifest)  # raises if it has no such splits
    if config.add_to:
        Base(*prepared_corpus(store, config.add_to)).check(config)
    return config


def growth_request(root: str, corpus: str) -> CorpusConfig | None:
    """What adds the new images of its source to a corpus; None if the source is as it was when the corpus was prepared.

    Raises ValueError if the source cannot be listed.
    """
    store = open_store(root)
    manifest = load_manifest(open_store(corpus))
    own = CorpusConfig.model_validate(manifest.provenance["request"])
    if corpus_version(store, own) == manifest.version:
        return None
    changes: dict[str, Any] = {"add_to": f"{manifest.name}/{manifest.version}", "recipe.known_ids": "skip"}
    return replace(own, **changes)


def _preset(request: PrepareRequest) -> CorpusConfig:
    fixed = {name: getattr(request, name) for name in PrepareRequest.model_fields}
    for name in fixed.keys() - {"preset", "source", "overrides"}:
        if fixed[name] != PrepareRequest.model_fields[name].default:
            raise ValueError(
                f"{name} is a field for a source of your own, but preset {request.preset!r} was given. Change the preset by "
                'overrides, as in {"recipe.decontaminate": ["digits"]}.'
            )
    assert request.preset
    return replace(PRESETS[request.preset](), **request.overrides)


def _of_source(request: PrepareRequest) -> CorpusConfig:
    name = request.name or (request.add_to or "").partition("/")[0]
    if not name:
        raise ValueError(
            f"name is empty; a corpus made from {request.source} needs one, as in 'birds-2026' (`--name birds-2026`)."
        )
    if request.add_to and "/" not in request.add_to:
        raise ValueError(
            f"add_to {request.add_to!r} names no version; give NAME/VERSION, so that the same request finds the same "
            "corpus. `vitline data ls` lists them."
        )
    refuse_form_fields({"name", "add_to", "source.kind", "source.path"} & request.overrides.keys())
    path = str(request.source)
    if "://" not in path:
        path = str(Path(path).expanduser().resolve())
        if not Path(path).exists():
            raise ValueError(
                f"The source {path} does not exist. Give the path of a folder, archive, table or dataset that exists, or "
                "the URI of a bucket."
            )
        if Path(path).is_dir() and _is_empty(path):
            raise ValueError(
                f"The folder {path} holds no file. Give a folder that holds a sub-folder of images per class."
            )
    config = CorpusConfig(
        name=name,
        source=_source(request.kind, path, request.overrides),
        recipe=CorpusRecipe(
            val_fraction=request.val_fraction,
            test_fraction=request.test_fraction,
            duplicates=request.duplicates,
            near_duplicates=request.near_duplicates,
            min_images_per_class=request.min_images_per_class,
            decontaminate=request.decontaminate,
        ),
        add_to=request.add_to or "",
    )
    return replace(config, **request.overrides)


def _is_empty(folder: str) -> bool:
    """Whether a folder holds nothing but folders, at any depth; a link counts as content."""
    return not any(
        files or any(os.path.islink(os.path.join(at, name)) for name in folders)
        for at, folders, files in os.walk(folder)
    )


def _source(kind: str, path: str, overrides: Mapping[str, Any]) -> Source:
    """The source with its required fields. The other overrides are applied later, together with those of the recipe."""
    form = next(form for form in SOURCES if form.model_fields["kind"].default == kind)
    given = {"path": path}
    for name, field in form.model_fields.items():
        if field.is_required() and name not in given:
            if f"source.{name}" not in overrides:
                choices = ", ".join(map(str, get_args(field.annotation)))
                raise ValueError(
                    f"A source of kind {kind} needs source.{name}{f', one of {choices}' if choices else ''}; set it as an "
                    f"override (`--set source.{name}=VALUE`)."
                )
            given[name] = overrides[f"source.{name}"]
    source: Source = form.model_validate(given)
    return source
