"""`vitline nights show`: finds a night and makes its verdict again."""

import contextlib
from datetime import date, datetime

from vitline.flows import console
from vitline.flows.catalog.lists import say_unreadable
from vitline.flows.nights.from_records import judge_again, known_nights
from vitline.flows.nights.night_record import NightRecord, last_told
from vitline.infra.config import replace
from vitline.infra.names import known_names_text
from vitline.infra.night import night_in, night_text
from vitline.infra.storage import Store


def chosen_night(root: Store, text: str, name: str | None) -> NightRecord:
    """The night that a text names: a scheduled start such as `2026-11-23T02:00`, in UTC unless it says otherwise; a UTC date, if one
    night of that date was run; or `last`, the newest that has ended. Raises ValueError
    if there is none, or several are meant."""
    every = [each for each in known_nights(root, say_unreadable) if name in (None, each.name)]
    if text == "last":
        last = last_told(every) or every[0] if every else None
        found = [each for each in every if last and each.night == last.night]
    else:
        found = [each for each in every if _is_meant(text, each.night)]
    found = [each for each in found if each.pipeline is not None] or found
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(f"{night_text(each.night)} of {each.name}" for each in found)
        raise ValueError(
            f"There are several such nights: {several}. Give the scheduled start as 2026-11-23T02:00, and --name."
        )
    wanted = f"{'any date' if text == 'last' else text}{f' of {name}' if name else ''}"
    known = known_names_text(wanted, dict.fromkeys(night_text(each.night) for each in every[:50]))
    raise ValueError(
        f"There is no night of {wanted} below {root.uri}; {known} A night of which nothing was started has no record."
    )


def _is_meant(text: str, night: datetime) -> bool:
    """Whether a text names this night. Raises ValueError for one that is no moment."""
    with contextlib.suppress(ValueError):
        return date.fromisoformat(text) == night.date()
    try:
        return night_in(text) == night
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not a night; write its scheduled start as 2026-11-23T02:00 (UTC), its date as 2026-11-23, or `last`."
        ) from error


def made_again(root: Store, night: NightRecord) -> NightRecord:
    """The night with its verdict made again from the records; the stored one where records are gone."""
    if night.pipeline is None or night.outcome == "running":
        return night
    try:
        again = judge_again(root, night)
    except (FileNotFoundError, RuntimeError) as error:
        console.say(f"The stored verdict is shown, as records are gone: {error}")
        return night
    if night.verdict is not None and again.sentence != night.verdict.sentence:
        console.say(f"The records have changed since the verdict was written: {night.verdict.sentence}")
    return replace(night, verdict=again)
