"""A night is a scheduled start: a moment in UTC, to the second. How it is made, named and shown."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime


def night_at(due: datetime) -> datetime:
    """The night of a scheduled start, in whatever time zone the schedule is."""
    return due.astimezone(UTC).replace(microsecond=0)


Night = Annotated[AwareDatetime, AfterValidator(night_at)]
"""A night as a field of configs and records."""


def night_in(text: str) -> datetime:
    """The night of a scheduled start as people write it, such as `2026-11-23T02:00`: in UTC unless it says otherwise. Raises ValueError."""
    moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    return night_at(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def night_name(night: datetime) -> str:
    """`2026-11-23T020000Z`: part of run keys, of object names, which sort by time, and of commands."""
    return f"{night:%Y-%m-%dT%H%M%SZ}"


def night_text(night: datetime) -> str:
    """`2026-11-23 02:00 UTC`, as pages and sentences show it."""
    return f"{night:%Y-%m-%d %H:%M:%S}".removesuffix(":00") + " UTC"


def named_night(name: str) -> datetime | None:
    """The night of a `night_name`; None for any other text."""
    try:
        return datetime.strptime(name, "%Y-%m-%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
