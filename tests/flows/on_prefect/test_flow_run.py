"""What a flow knows of its own run."""

from datetime import UTC, date, datetime
from uuid import uuid4

from prefect.client.schemas.schedules import CronSchedule

from vitline.flows.on_prefect.flow_run import FlowRun


def test_missed_nights_are_those_that_the_schedule_had_due():
    weekdays = CronSchedule(cron="0 2 * * 1-5", timezone="UTC")
    monday = datetime(2026, 11, 23, 2, tzinfo=UTC)
    this = FlowRun(uuid4(), "pretrain-then-transfer/nightly", True, monday, {}, schedules=(weekdays,))
    assert this.due_between(date(2026, 11, 20)) == []  # a week-end misses nothing
    assert this.due_between(date(2026, 11, 18)) == [date(2026, 11, 19), date(2026, 11, 20)]
    by_hand = FlowRun(uuid4(), None, False, monday, {}, schedules=(weekdays,))
    assert by_hand.due_between(date(2026, 11, 18)) == []
