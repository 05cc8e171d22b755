"""A training that cannot go on: the flow run's page says what failed first and shows the end of the log."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_first_failing_rank_and_the_last_lines_of_its_log_are_on_the_page(work):
    made = work.start("prepare-corpus/default", preset="digits-0-to-4", overrides={"recipe.order_seed": 7})
    message = work.flows.wait(made)["state"]["message"]
    assert "images in s3://" in message or "images in file://" in message
    uri = message.split(" in ")[1].split(" ")[0]
    (shard,) = work.root.list(f"{uri.removeprefix(work.root.uri + '/')}/train/")
    data = work.root.read(shard)
    work.root.write(shard, data[: len(data) // 2])

    overrides = {"recipe.total_steps": 50, "recipe.optim.warmup_steps": 1, "execution.max_restarts_without_progress": 1}
    run = work.start("pretrain/default", corpus=uri, recipe="digits", name="damaged", overrides=overrides)
    ended = work.flows.wait(run)
    key = work.key(run)
    assert (ended["state_type"], ended["state_name"]) == ("FAILED", "Failed")
    assert key in ended["state"]["message"]
    assert "rank 0: " in ended["state"]["message"]
    assert shard.rpartition("/")[2] in ended["state"]["message"]
    assert "\n" not in ended["state"]["message"]
    shown = work.flows.artifacts(run)["failure"]["data"]
    assert key in shown
    assert "rank 0: " in shown
    assert "The last lines of its job's log" in shown
    assert any("Last lines of its log" in line for line in work.flows.lines(run))
    work.eventually(lambda: work.mlflow_status(key) == "FAILED")
