"""`vitline nights show`: finds a night, makes its verdict again, and prints it."""

from datetime import date

from vitline.flows import console
from vitline.flows.catalog import say_unreadable
from vitline.flows.nights.from_records import judge_again, known_nights
from vitline.flows.nights.night_page import COLUMNS, change_rows, difference_rows, footnote, notes, title
from vitline.flows.nights.night_record import NightRecord
from vitline.infra.config import replace
from vitline.infra.names import there_are
from vitline.infra.storage import Store


def chosen_night(root: Store, text: str, name: str | None) -> NightRecord:
    """The night of a date as text, such as `2026-11-23` (`last`: the newest one), and series. Raises ValueError if there is none, or
    several series have one."""
    try:
        night = None if text == "last" else date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a date; write it as 2026-11-23, or `last`.") from error
    every = known_nights(root, say_unreadable)
    found = [each for each in every if night in (None, each.night) and name in (None, each.name)]
    if night is None and found:
        found = [each for each in found if each.night == found[0].night]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(sorted(each.name for each in found))
        raise ValueError(f"There are several nights of {found[0].night}: {names}. Choose one with --name.")
    wanted = f"{night or 'any date'}{f' of {name}' if name else ''}"
    known = there_are(wanted, dict.fromkeys(f"{each.night}" for each in every[:50]))
    raise ValueError(
        f"There is no night of {wanted} below {root.uri}; {known} A night of which nothing was started has no record."
    )


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


def print_night(night: NightRecord) -> None:
    console.print_result(f"{night.night}  {night.name}  {night.pipeline or ''}".rstrip())
    console.print_result(night.sentence)
    if night.gate is not None:
        console.print_result(night.gate.reason)
    for against in night.verdict.against if night.verdict else ():
        if against.differences:
            console.table(title(against), list(COLUMNS), difference_rows(against), right=tuple(range(1, 7)))
        for line in notes(against):
            console.print_result(line)
        if rows := change_rows(against):
            console.table("Changed", ["", "there", "here"], rows)
    if text := footnote(night):
        console.print_result(text.replace("`", ""))
