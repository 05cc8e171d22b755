"""The gate: whether a night becomes the champion of its series, and why. It reads records and changes nothing.

A night passes if it is better than the champion, worse on no task, and scored on all of its tasks; if its training corpora hold no more
test images of these tasks than the champion's, and both models see images alike, so that the difference is that of the models; and if
the report that shows all this is there. The first whole night of a series passes where its report is there.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vitline.flows.catalog.lists import corpus_stats
from vitline.flows.catalog.records import PipelineRecord, read_pipeline
from vitline.flows.nights.judge import Verdict, changes, short_name
from vitline.flows.nights.night_record import ChampionRecord, GateResult
from vitline.infra.html.text import and_list
from vitline.infra.storage import Store, open_store
from vitline.vit.published.model_record import published_record, read_contract


def gate(root: Store, record: PipelineRecord, verdict: Verdict, champion: ChampionRecord | None) -> GateResult:
    """The result for a whole night. Raises FileNotFoundError or UnreadableRecord where records are gone."""
    if champion is not None and champion.pipeline == record.key:
        return GateResult(passed=False, reason="It is the champion already.")
    refusals = [] if champion is None else _against_champion(root, record, verdict, champion)
    if record.look is not None and record.decided_early:
        refusals.append(f"this night has scores on {record.look.scored}")
    if record.report is None:
        refusals.append("it has no report")
    if refusals:
        return GateResult(passed=False, reason=f"The champion stays: {'; '.join(refusals)}.")
    if champion is None:
        return GateResult(passed=True, reason="The first whole night of its series becomes the champion.")
    return GateResult(passed=True, reason=verdict.sentence.partition(". ")[0] + ".")


def _against_champion(root: Store, record: PipelineRecord, verdict: Verdict, champion: ChampionRecord) -> list[str]:
    """Why a night does not take the champion's place."""
    against = next((one for one in verdict.against if one.who == "champion"), None)
    if against is None:
        return [f"its records ({champion.pipeline}) are gone, so nothing can be compared with it"]
    if against.word != "better":
        return [f"this night is not better ({against.word})"]
    refusals = []
    if worse := [short_name(difference.name) for difference in against.differences if difference.word == "worse"]:
        refusals.append(f"this night is worse on {and_list(worse)}")
    if against.only_theirs:
        refusals.append(f"this night has no score on {and_list([short_name(name) for name in against.only_theirs])}")
    theirs = read_pipeline(root, champion.pipeline)
    leaked, before = leaked_images(root, record), leaked_images(root, theirs)
    if more := [f"{name} {leaked[name] - before[name]:,}" for name in sorted(leaked) if leaked[name] > before[name]]:
        refusals.append(f"its training images show more test images of a task than the champion's: {and_list(more)}")
    if changed := changes(_contract(theirs), _contract(record)):
        refusals.append(f"the models see images differently ({and_list(list(changed))})")
    return refusals


def leaked_images(root: Store, record: PipelineRecord) -> Counter[str]:
    """The training images of a pipeline that are test images of a corpus, by its name, as the preparations have found them."""
    found: Counter[str] = Counter()
    if (run := record.training(root)) is None:
        return found
    config = run.read_json("config.json")["config"]
    mixture = config.get("mixture") or {"corpora": [{"corpus": config["corpus"]}]}
    for uri in (each["corpus"] for each in mixture["corpora"]):
        for leak, images in corpus_stats(open_store(uri)).stats.leakage.items():
            if leak.corpus_split == "test" and leak.own_split == config["split"]:
                found[leak.corpus.partition("/")[0]] += images.count
    return found


def _contract(record: PipelineRecord) -> Mapping[str, Any]:
    model = open_store(record.model or "")
    return read_contract(model, published_record(model))
