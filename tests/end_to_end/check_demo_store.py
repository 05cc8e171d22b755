"""Asserts what a demo run left in its store: `python tests/end_to_end/check_demo_store.py ROOT`."""

import sys

from data_prep.verify_shards import verify_corpus
from flows.catalog import list_corpora, list_models, list_runs
from infra.journal import read_journal
from infra.storage import open_store
from vit.checkpoint import list_checkpoints
from vit.published import load_model
from vit.vtab.evaluate import list_scores


def main(root: str) -> None:
    store = open_store(root)
    corpora = list_corpora(root)
    assert len(corpora) >= 2, corpora
    for corpus in corpora:
        report = verify_corpus(open_store(corpus["uri"]))
        assert not report.problems, report.problems
    runs = {row["stage"]: row for row in list_runs(root)}
    assert {"prepare", "pretrain", "evaluate"} <= runs.keys(), runs
    assert all(row["state"] == "finished" for row in runs.values()), runs
    run = open_store(runs["pretrain"]["uri"])
    assert list_checkpoints(run)
    assert {"train/loss", "val/top1", "optim/lr"} <= {record.key for record in read_journal(run)}
    (model,) = list_models(root)
    assert len(load_model(model["uri"]).classes) == model["classes"]
    scores = list(list_scores(store))
    tasks = {score.task for score in scores}
    assert len(scores) == 2 * len(tasks), scores
    tests = {row["name"]: row["splits"]["test"] for row in corpora if "test" in row["splits"]}
    assert all(score.num_examples == tests[score.task] for score in scores)
    (report,) = store.list("reports/")
    page = store.read(report).decode()
    assert "What the model saw" in page
    assert "http" not in page.replace("http-equiv", "")
    names = sorted(row["name"] for row in corpora)
    print(
        f"{', '.join(names)}: prepared and verified; run {runs['pretrain']['run']}; {len(scores)} scores on {sorted(tasks)}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
