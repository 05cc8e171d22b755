"""What a flow knows of its own run."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.schemas.schedules import CronSchedule

from vitline.flows.on_prefect.flow_run import FlowRun, check_project
from vitline.infra.night import night_name, night_text


def test_missed_nights_are_those_that_the_schedule_had_due():
    weekdays = CronSchedule(cron="0 2 * * 1-5", timezone="UTC")
    monday = datetime(2026, 11, 23, 2, tzinfo=UTC)
    this = FlowRun(uuid4(), "pretrain-then-transfer/nightly", True, monday, {}, schedules=(weekdays,))
    thursday, friday = monday - timedelta(4), monday - timedelta(3)
    assert this.due_between(friday) == []  # a week-end misses nothing
    assert this.due_between(monday - timedelta(5)) == [thursday, friday]
    assert replace(this, begun=(friday,)).due_between(monday - timedelta(5)) == [thursday], "it is running"
    by_hand = FlowRun(uuid4(), None, False, monday, {}, schedules=(weekdays,))
    assert by_hand.due_between(monday - timedelta(5)) == []
    assert replace(by_hand, night_by_hand=friday).due_between(monday - timedelta(5)) == [thursday]


def test_a_night_is_a_scheduled_start_also_where_two_have_one_date():
    """01:00 in Berlin on both sides of the change to summer time, and two schedules of one day."""
    berlin = CronSchedule(cron="0 1 * * *", timezone="Europe/Berlin")
    twice = CronSchedule(cron="0 5,17 * * *", timezone="UTC")

    def run(*due, schedules=()):
        return FlowRun(
            uuid4(), "pretrain-then-transfer/nightly", True, datetime(*due, tzinfo=UTC), {}, schedules=schedules
        )

    winter, summer = run(2026, 3, 29, 0), run(2026, 3, 29, 23, schedules=(berlin,))
    assert winter.night != summer.night
    assert (night_name(winter.night), night_text(summer.night)) == ("2026-03-29T000000Z", "2026-03-29 23:00 UTC")
    assert summer.due_between(winter.night) == [], "it is the next night"
    assert summer.due_between(run(2026, 3, 28, 0).night) == [winter.night]
    later = run(2026, 3, 30, 5, schedules=(twice,))
    assert later.due_between(run(2026, 3, 29, 5).night) == [run(2026, 3, 29, 17).night]


def test_a_run_of_another_project_is_refused():
    ours = FlowRun(uuid4(), "pretrain/birds-default", False, datetime.now(UTC), {})
    check_project(ours)
    with pytest.raises(ValueError, match="deployment pretrain/birds-default, and VITLINE_PROJECT names 'vitline'"):
        check_project(replace(ours, of_our_project=False))
