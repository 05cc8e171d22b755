"""The page of a pipeline shows its stages before they begin, and pages that come later as soon as they are there."""

from vitline.flows.on_prefect.live_page import LivePage


def test_stages_states_and_links_are_shown_from_the_first_second_on():
    sent, mlflow = list[str](), dict[str, str]()
    page = LivePage(("prepare-corpus", "pretrain", "evaluate"), {"MLflow": lambda: mlflow.get("p")}, sent.append)
    page.refresh()
    assert [line for line in sent[-1].splitlines() if "not started" in line] == [
        "| prepare-corpus | not started |  |  |",
        "| pretrain | not started |  |  |",
        "| evaluate | not started |  |  |",
    ]

    page.begin("prepare-corpus")
    page.report("report of birds", lambda: "`s3://b/corpora/birds/1/report.html`")
    page.end("finished")
    page.begin("pretrain")
    page.follows("birds-0a", "http://ray/#/jobs/birds-0a-a1", lambda: mlflow.get("birds-0a"))
    page.refresh("waiting", "no progress yet after 0:12; other running jobs: x-a1")
    prepared, trained, _ = sent[-1].splitlines()[2:5]
    assert prepared == "| prepare-corpus | finished | 0:00 | report of birds: `s3://b/corpora/birds/1/report.html` |"
    assert trained.startswith("| pretrain | waiting: no progress yet after 0:12; other running jobs: x-a1 | since ")
    assert trained.endswith(" UTC | `birds-0a` ([Ray job](http://ray/#/jobs/birds-0a-a1)) |")

    before = len(sent)
    page.refresh("waiting", "no progress yet after 0:12; other running jobs: x-a1")
    assert len(sent) == before, "nothing has changed"
    mlflow |= {"p": "[the pipeline](http://mlflow/p)", "birds-0a": "http://mlflow/r"}
    page.refresh("running", "120/600 steps")
    assert "| running: 120/600 steps | " in sent[-1]
    assert "([Ray job](http://ray/#/jobs/birds-0a-a1), [MLflow](http://mlflow/r))" in sent[-1]
    assert sent[-1].endswith("- MLflow: [the pipeline](http://mlflow/p)")
    page.end("preempted")
    page.begin("pretrain")  # another seed, which was not announced
    assert [line.split(" | ")[1] for line in sent[-1].splitlines() if line.startswith("| pretrain")] == [
        "preempted",
        "running",
    ]
