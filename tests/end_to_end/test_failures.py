"""A training that cannot go on: the flow run's page says what failed first and shows the end of the log."""

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def damaged(work):
    """URI of a copy of the tiny pipeline's corpus whose only training shard is cut in half."""
    (manifest,) = [k for k in work.root.list("corpora/digits-0-to-4/") if k.endswith("/manifest.json")]
    source = manifest.removesuffix("manifest.json")
    for key in work.root.list(source):
        work.root.write(f"corpora/damaged/1/{key.removeprefix(source)}", work.root.read(key))
    (shard,) = work.root.list("corpora/damaged/1/train/")
    work.root.write(shard, work.root.read(shard)[:1000])
    yield work.root.uri_of("corpora/damaged/1")
    for key in work.root.list("corpora/damaged/"):
        work.root.delete(key)


def test_the_first_failing_rank_and_the_last_lines_of_its_log_are_on_the_page(work, damaged):
    overrides = {"recipe.total_steps": 50, "recipe.optim.warmup_steps": 1, "execution.max_restarts_without_progress": 1}
    run = work.start("pretrain/default", corpus=damaged, recipe="digits", name="damaged", overrides=overrides)
    ended = work.flows.wait(run)
    key = work.key(run)
    message = ended["state"]["message"]
    assert (ended["state_type"], ended["state_name"]) == ("FAILED", "Failed")
    assert re.search(
        rf"{key} ended as failed: .* rank [01]: ShardError: {damaged}/train/s000/part-00000-of-00001.parquet", message
    )
    assert "\n" not in message
    shown = work.flows.artifacts(run)["failure"]["data"]
    assert re.search(rf"{key}.* rank [01]: ShardError", shown)
    assert "The last lines of its job's log" in shown
    # Prefect gets the lines of a run a few seconds after its state.
    work.eventually(lambda: any("Last lines of its log" in line for line in work.flows.lines(run)))
    work.eventually(lambda: work.mlflow_status(key) == "FAILED")
