"""Verdicts of nights from what the store holds, and the commands that show them."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from vitline.flows.catalog.records import Origin, write_pipeline
from vitline.flows.forms.nights import NightSettings
from vitline.flows.nights.from_records import (
    NOISE_NIGHTS,
    facts_of,
    judge_again,
    known_nights,
    night_of,
    scores_of,
    without_verdict,
)
from vitline.flows.nights.judge import judge
from vitline.flows.nights.night_page import night_markdown
from vitline.flows.nights.night_record import read_night, write_night
from vitline.flows.nights.not_run import note_missed, note_not_run
from vitline.flows.nights.plan import plan_text
from vitline.flows.nights.promote import promote
from vitline.flows.nights.show import chosen_night
from vitline.flows.runs.stage import Skipped
from vitline.flows.to_mlflow.stage_snapshots import pipeline_snapshot
from vitline.infra import config
from vitline.infra.storage import open_store

from .simulated import Nights, store_night


@pytest.fixture
def store(root):
    return open_store(root)


def judged(store, night, state="finished", reason="", **kept):
    """The night's record, as the end of its pipeline writes it."""
    record = store_night(store, night, state=state, **kept)
    found = night_of(store, record, state, reason)
    write_night(store, found)
    return found


def run(*arguments):
    from typer.testing import CliRunner

    from vitline.flows.cli.main import app

    return CliRunner().invoke(app, arguments)


def test_a_worse_night_says_so_and_the_command_says_the_same(store, root):
    nights = Nights(1, seeds_sd=0.1)
    first = judged(store, nights.night())
    assert first.sentence == "Not compared: there is neither a champion nor an earlier whole night."
    for _ in range(4):
        judged(store, nights.night())
    worse = judged(store, nights.night(shift=-1.0), corpora={"birds": 64 * "b"}, images={"birds": 1505})
    assert worse.verdict.word == "worse"
    assert worse.sentence.startswith("Worse than last night (night of 2026-01-06 02:00 UTC): -")
    assert worse.sentence.endswith(
        "Changed since: corpora.birds aaaaaaaaaaaa to bbbbbbbbbbbb, images.birds 1500 to 1505."
    )
    assert all(difference.paired for difference in worse.verdict.against[0].differences)
    judged(store, nights.night())  # what comes later changes nothing
    assert judge_again(store, worse) == worse.verdict
    shown = run("nights", "show", "2026-01-07T02:00", "--root", root)
    assert shown.exit_code == 0, shown.output
    assert worse.sentence in shown.output
    as_json = json.loads(run("nights", "show", "2026-01-07", "--root", root, "--json").output)
    assert as_json == json.loads(worse.model_dump_json())
    rows = json.loads(run("nights", "ls", "--root", root, "--json").output)["nights"]
    assert [row["night"] for row in rows] == [f"2026-01-0{day} 02:00 UTC" for day in range(8, 1, -1)]
    assert rows[1]["verdict"] == "worse"


def test_two_nights_of_one_date_are_two_in_the_store_and_on_the_command_line(store, root):
    nights, moment = Nights(11), datetime(2026, 3, 29, tzinfo=UTC)
    for hour in (0, 23):  # 01:00 in Berlin, on both sides of the change to summer time
        judged(store, replace(nights.night(), night=moment + timedelta(hours=hour)))
    rows = json.loads(run("nights", "ls", "--root", root, "--json").output)["nights"]
    assert [row["night"] for row in rows] == ["2026-03-29 23:00 UTC", "2026-03-29 00:00 UTC"]
    assert "night of 2026-03-29 00:00 UTC" in rows[0]["sentence"], "the second is compared with the first"
    both = "2026-03-29 23:00 UTC of nightly, 2026-03-29 00:00 UTC of nightly"
    with pytest.raises(ValueError, match=f"There are several such nights: {both}"):
        chosen_night(store, "2026-03-29", None)
    for text in ("2026-03-29T00:00", "2026-03-29T01:00+01:00", "2026-03-29T000000Z", "2026-03-29 00:00 UTC"):
        assert chosen_night(store, text, None).pipeline == rows[1]["pipeline"]
    with pytest.raises(ValueError, match="'monday' is not a night; write its scheduled start as"):
        chosen_night(store, "monday", None)


def test_missed_late_cut_and_failed_nights_are_said_so_and_never_compared(store):
    nights = Nights(2)
    whole = judged(store, nights.night())
    cut = judged(store, nights.night(shift=-3), state="out_of_time", reason="the deadline has passed")
    assert cut.sentence == "Not compared: the night was cut, because it reached its deadline. the deadline has passed"
    failed = judged(store, nights.night(shift=-3), state="failed", reason="no room")
    assert (failed.verdict.word, failed.sentence) == ("broken", "Broken: the night failed. no room")
    late, refused, last = (whole.night + timedelta(days) for days in (3, 4, 8))
    note_not_run(store, "nightly", late, Origin(), Skipped("due 3.5 h ago."), late=True)
    note_not_run(store, "nightly", refused, Origin(), ValueError("no corpus 'birds'."), late=False)
    assert read_night(store, "nightly", late).sentence == "Not compared: the night was late. due 3.5 h ago."
    assert read_night(store, "nightly", refused).verdict.word == "broken"

    def due(after):
        return [after + timedelta(1 + day) for day in range((last - after).days - 1)]

    assert note_missed(store, "nightly", last, due) == [refused + timedelta(1 + day) for day in range(3)]
    assert read_night(store, "nightly", last - timedelta(1)).outcome == "missed"
    assert note_missed(store, "other", last, due) == []
    after = judged(store, replace(nights.night(), night=last))
    assert [one.night for one in after.verdict.against] == [whole.night]


def test_the_champion_of_the_store_is_compared_with(store):
    nights = Nights(3, seeds_sd=0.1)
    champion, *_ = [judged(store, nights.night()) for _ in range(3)]
    promoted = promote(store, champion.pipeline, why="the first", by="a@b")
    after = judged(store, nights.night(shift=2.0))
    assert [(one.who, one.night) for one in after.verdict.against] == [
        ("champion", champion.night),
        ("last night", champion.night + timedelta(2)),
    ]
    assert after.verdict.word == "better"
    again = promote(store, after.pipeline, why="better", by="a@b")
    assert (again.replaces, again.counter, promoted.counter) == (champion.pipeline, 2, 1)
    assert judge_again(store, after) == after.verdict  # with the champion of its time
    with pytest.raises(ValueError, match="ended as failed, so it is no champion"):
        promote(store, judged(store, nights.night(), state="failed").pipeline, why="x", by="a@b")
    with pytest.raises(ValueError, match="'none' is the key of no pipelines; available: "):
        promote(store, "none", why="x", by="a@b")


def test_nights_of_older_versions_have_no_record_and_are_shown(store, root):
    nights = Nights(4)
    for _ in range(2):
        store_night(store, nights.night())
    (newest, _) = known_nights(store, print)
    assert newest.verdict is None
    shown = run("nights", "show", "last", "--root", root)
    assert "Within noise of last night (night of 2026-01-02 02:00 UTC)" in shown.output, shown.output


def test_where_predictions_are_gone_the_test_is_not_paired(store):
    nights = Nights(5)
    judged(store, nights.night())
    second = nights.night()
    record = store_night(store, second)
    for key in store.list("trials/"):
        if key.endswith(".parquet"):
            store.delete(key)
    verdict = night_of(store, record, "finished").verdict
    assert not any(difference.paired for difference in verdict.against[0].differences)


def test_the_plan_says_which_difference_can_be_seen_and_which_number_of_seeds_it_takes(store):
    nights, next_night = Nights(6, seeds_sd=0.05, noise=0.3), datetime(2026, 3, 1, 2, tzinfo=UTC)
    settings = NightSettings(num_seeds=3, smallest_effect=0.03)
    assert plan_text(store, "nightly", next_night, settings).endswith("is not known from earlier nights yet")
    for _ in range(8):
        store_night(store, nights.night())
    text = plan_text(store, "nightly", next_night, settings)
    assert "by the noise of earlier nights, a difference of " in text
    assert "the wanted 3.0 take nights.num_seeds=" in text
    assert plan_text(store, "nightly", next_night, config.replace(settings, smallest_effect=0.5)).endswith(
        "four times in five"
    )


def test_mlflow_gets_word_sentence_differences_and_page(store):
    nights = Nights(9, seeds_sd=0.1)
    for _ in range(4):
        judged(store, nights.night())
    worse = judged(store, nights.night(shift=-1.0))
    snapshot, _ = pipeline_snapshot(store, worse.pipeline)
    assert snapshot.tags["vitline.verdict"] == snapshot.tags["vitline.verdict.last_night"] == "worse"
    assert snapshot.tags["vitline.verdict.sentence"] == worse.sentence
    assert snapshot.values["night/last_night/difference"] == (worse.verdict.against[0].whole.value, 0)
    page = snapshot.files["verdict.md"].decode()
    assert page.startswith(f"**{worse.sentence}**")
    assert "| digits | " in page


@pytest.mark.slow
def test_fifty_nights_of_noise_have_the_verdicts_of_the_statistics(store):
    """How often those are wrong is tested in `test_judge.py`."""
    nights = Nights(7)
    made = [nights.night() for _ in range(50)]
    found = [judged(store, night).verdict for night in made]
    expected = [
        judge(night, None, made[i - 1] if i else None, made[max(i - NOISE_NIGHTS, 0) : i], wanted=0.01)
        for i, night in enumerate(made)
    ]
    assert [(v.word, v.against and v.against[0].differences) for v in found] == [
        (v.word, v.against and v.against[0].differences) for v in expected
    ]


def test_a_record_of_another_night_changes_nothing(store):
    nights = Nights(8)
    first = judged(store, nights.night())
    write_pipeline(store, config.replace(store_night(store, nights.night(), name="other"), state="finished"))
    second = judged(store, nights.night())
    assert [one.key for one in second.verdict.against] == [first.pipeline]


def two_protocols(store, night, value, state="finished", **kept):
    """The record of a night that was evaluated by a probe first, with this score on one of its tasks."""
    record = store_night(store, night, **kept)
    probed = replace(night, key=f"{night.key}-probed", tasks={"tasks/digits/top1": night.tasks["tasks/digits/top1"]})
    probe = [stage for stage in store_night(store, probed).stages if stage.stage == "evaluate"]
    store.delete(f"pipelines/{probed.key}.json")
    stages = [config.replace(stage, protocol="fewshot") for stage in probe]
    stages += [config.replace(s, protocol="vit-paper") if s.stage == "evaluate" else s for s in record.stages]
    overrides = {"protocol.fewshot.shots": [5], "protocol.vit-paper.total_steps": 700}
    record = config.replace(
        record, stages=stages, verdict_protocol="vit-paper", state=state, part="evaluation with vit-paper",
        request=record.request | {"protocol": ["fewshot", "vit-paper"], "overrides": overrides},
        metrics={"fewshot/digits/5shot/top1": value, "tasks/digits/top1": 0.5},
    )  # fmt: skip
    write_pipeline(store, record)
    return record


def test_a_night_is_judged_by_one_protocol_and_shows_the_others_beside_it(store, root):
    nights = Nights(3)
    alone = store_night(store, nights.night())
    asked = {"protocol": "vit-paper", "overrides": {"protocol.total_steps": 700}}
    write_pipeline(store, config.replace(alone, request=alone.request | asked))
    first = two_protocols(store, nights.night(), 0.25)
    write_night(store, night_of(store, first, "finished"))
    second = two_protocols(store, nights.night(), 0.5)
    judged = night_of(store, second, "finished")
    write_night(store, judged)
    ours = scores_of(store, second, predictions=False)
    assert ours.tasks.keys() == {"tasks/digits/top1", "tasks/emoji/top1"}
    assert {name: value for name, value in ours.facts.items() if name.startswith("request.prot")} == {
        "request.protocol": "vit-paper", "request.protocol.total_steps": 700,
    }  # fmt: skip
    assert ours.facts == facts_of(store, alone) | {"commit": ours.facts["commit"]} | {
        "request.protocol": "vit-paper", "request.protocol.total_steps": 700,
    }, "a probe that is added changes nothing that the verdict depends on"  # fmt: skip
    (other,) = judged.others
    assert (other.name, other.value, other.before) == ("fewshot/digits/5shot/top1", 0.5, {"last night": 0.25})
    probe = scores_of(store, first, predictions=False, protocol="fewshot")
    assert (probe.tasks.keys(), probe.facts["request.protocol"]) == ({"tasks/digits/top1"}, "fewshot")
    assert scores_of(store, first, predictions=False, protocol="linear").facts["request.protocol"] == "vit-paper"
    shown = run("nights", "show", "last", "--root", root).output
    assert "fewshot/digits/5shot/top1" in shown
    assert "Other protocols, without a verdict" in night_markdown(judged)
    assert "| fewshot/digits/5shot/top1 | 50.0 % | - | 25.0 % |" in night_markdown(judged)


def test_a_night_says_in_which_part_it_was_cut_failed_or_is_now(store):
    record = two_protocols(store, Nights(3).night(), 0.25, state="running")
    assert without_verdict(record).sentence.endswith("UTC, and is in its evaluation with vit-paper.")
    cut = night_of(store, record, "out_of_time", "It had no time left.")
    assert cut.sentence == (
        "Not compared: the night was cut in its evaluation with vit-paper, because it reached its deadline. It had no time left."
    )
    assert cut.part == "evaluation with vit-paper"
    assert [other.value for other in cut.others] == [0.25], "what has ended before is shown"
    assert night_of(store, record, "failed", "No room.").sentence == (
        "Broken: the night failed in its evaluation with vit-paper. No room."
    )
    write_pipeline(store, config.replace(record, state="out_of_time", reason="It had no time left."))
    assert judge_again(store, cut) == cut.verdict
    assert night_of(store, record, "finished").part == ""
