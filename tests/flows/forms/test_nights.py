"""Which night a run is that a person starts."""

from datetime import UTC, datetime

import pytest

from vitline.flows.forms.nights import night_by_hand, night_settings

DUE = datetime(2026, 11, 29, 22, 15, 30, 250_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("chosen", "night"),
    [
        ("now", datetime(2026, 11, 29, 22, 15, 30, tzinfo=UTC)),
        ("2026-11-23T02:00", datetime(2026, 11, 23, 2, tzinfo=UTC)),
        ("2026-11-23 02:00 UTC", datetime(2026, 11, 23, 2, tzinfo=UTC)),
        ("2026-11-23T02:00+01:00", datetime(2026, 11, 23, 1, tzinfo=UTC)),
    ],
)
def test_a_person_chooses_a_night_by_its_start_or_makes_one_now(chosen, night):
    assert night_by_hand({"nights.night": chosen}, DUE) == night


def test_without_a_choice_it_is_no_night():
    assert night_by_hand({"nights.num_seeds": 3}, DUE) is None


def test_a_night_in_the_future_and_a_text_that_is_none_are_refused():
    with pytest.raises(
        ValueError, match=r"^nights\.night=2026-11-30T02:00 is in the future\. Give the scheduled start"
    ):
        night_by_hand({"nights.night": "2026-11-30T02:00"}, DUE)
    with pytest.raises(
        ValueError,
        match=r"nights\.night: must be `now`, or a scheduled start in UTC such as 2026-11-23T02:00, not 'last",
    ):
        night_settings({"nights.night": "last tuesday"})
