"""A small pipeline with two protocols on real parts: a probe whose scores can be seen while the fine-tuning still runs."""

import re

import pytest

from vitline.flows.catalog.records import read_pipeline
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.nights.from_records import scores_of
from vitline.flows.runs.end_to_end import pretrain_then_transfer
from vitline.flows.runs.services import ConsoleObserver, open_services
from vitline.flows.to_mlflow.stage_snapshots import pipeline_snapshot
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

from ...elements import Elements

SMALL = {
    "recipe.total_steps": 6,
    "recipe.optim.warmup_steps": 1,
    "execution.num_workers": 1,
    "protocol.small-images.total_steps": 3,
    "protocol.small-images.warmup_steps": 1,
    "protocol.small-images.learning_rates": [0.1],
}
PROBED = [f"fewshot/digits-5-to-9/{shots}shot/top1" for shots in (5, 10, 25)]


class Watching(ConsoleObserver):
    """Reads the record of the pipeline whenever one of its parts begins."""

    def __init__(self, store):
        self.store, self.seen = store, {}

    def part(self, name, title, request, body, row=None):
        self.seen[row or name] = read_pipeline(self.store, request["pipeline"])
        return super().part(name, title, request, body, row)


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.timeout(900)
def test_the_scores_of_the_first_protocol_are_there_while_the_second_runs(root, tmp_path):
    store = open_store(root)
    request = PipelineRequest(
        name="both", corpus="digits-0-to-4", recipe="digits", tasks=("digits-5-to-9",), protocol=("fewshot", "small-images"),
        overrides=SMALL,
    )  # fmt: skip
    observer = Watching(store)
    with open_services(Settings(root=root, home=tmp_path), observer) as services:
        done = pretrain_then_transfer(resolve_pipeline(root, request), services)
    meanwhile = observer.seen["evaluate small-images"]
    assert (meanwhile.state, meanwhile.part) == ("running", "evaluation with small-images")
    assert meanwhile.metrics.keys() == {"val/top1", *PROBED}
    assert meanwhile.report == done.record.report
    assert [(stage.stage, stage.protocol) for stage in done.record.stages] == [
        ("prepare", None), ("pretrain", None), ("evaluate", "fewshot"), ("evaluate", "small-images"),
    ]  # fmt: skip
    assert done.record.metrics.keys() == {
        "val/top1", *PROBED, *(f"tasks/digits-5-to-9/{name}{of}" for name in ("top1", "ece") for of in ("", "_from_scratch")),
    }  # fmt: skip
    assert list(scores_of(store, done.record, predictions=True).tasks) == ["tasks/digits-5-to-9/top1"]
    shown = Elements(store.read(f"reports/{done.record.key}.html").decode()).text
    assert re.search("fewshot-5.*fewshot-10.*fewshot-25.*small-images-", shown, re.DOTALL)
    assert "With other pipelines, the scores of small-images are compared." in shown
    sent, _ = pipeline_snapshot(store, done.record.key)
    assert sent.values.keys() >= {*done.record.metrics, "time/evaluate_s", "time/evaluate/fewshot_s"}
    assert sent.params["transfer.protocol"].startswith("small-images-")
    assert sent.params["request.protocol"] == "fewshot, small-images"
