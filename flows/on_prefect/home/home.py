"""The home page: what needs a person, the nights, active runs, and what starts next. Made from records, in Markdown."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from vitline.flows.catalog.lists import list_runs_and_pipelines, without_parts
from vitline.flows.catalog.run_status import progress_text
from vitline.flows.nights.from_records import known_nights
from vitline.flows.nights.night_record import NightRecord, last_told, read_champion
from vitline.flows.nights.trend.trend import night_point
from vitline.infra.html.tables import markdown
from vitline.infra.html.text import percent
from vitline.infra.night import night_text
from vitline.infra.records import UnreadableRecord
from vitline.infra.storage import Store

NIGHTS_SHOWN = 7
MARKS = {"better": "▲ better", "worse": "▼ worse", "broken": "✕ broken"}
"""Verdicts with a sign, because a Markdown table has no colours."""


class Upcoming(NamedTuple):
    """The next scheduled run of a deployment."""

    due: datetime
    name: str
    """FLOW/DEPLOYMENT."""
    page: str


def home_markdown(root: Store, problems: Iterable[str], upcoming: Sequence[Upcoming], disk: str) -> str:
    """The whole page. `problems` are sentences; `disk` says how much is left of which disk."""
    every = last_nights(root)
    attention = [*problems, *(line for nights in every.values() for line in series_attention(nights))]
    parts = [
        f"As of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; `reconcile` writes this page every 15 minutes. {disk}",
        "## Needs a person\n\n" + ("\n".join(f"- {line}" for line in attention) or "Nothing."),
        "## At work\n\n" + at_work(root),
        *(series_markdown(root, name, nights) for name, nights in every.items()),
        "## Starts next\n\n" + upcoming_markdown(upcoming),
    ]
    return "\n\n".join(parts)


def last_nights(root: Store) -> dict[str, list[NightRecord]]:
    """The last nights of each series by its name, newest first."""
    every = known_nights(root, lambda unreadable: None, NIGHTS_SHOWN)  # `vitline nights ls` says what cannot be read
    names = sorted({night.name for night in every})
    return {name: [night for night in every if night.name == name][:NIGHTS_SHOWN] for name in names}


def series_attention(nights: Sequence[NightRecord]) -> Iterable[str]:
    """The last night of a series that says something, if somebody has to act on it."""
    if (night := last_told(nights)) is None:
        return
    which = link(f"{night.name}, night of {night_text(night.night)}", night.origin.flow_run_url)
    verdict = night.verdict
    if verdict is None or verdict.word in ("worse", "broken"):
        yield f"{which}: {night.sentence}"
    elif night.gate is not None and not night.gate.passed and verdict.word == "better":
        yield f"{which}: {night.gate.reason}"


def series_markdown(root: Store, name: str, nights: Sequence[NightRecord]) -> str:
    champion = "no champion yet"
    try:
        if (record := read_champion(root, name)) is not None:
            champion = f"champion `{record.pipeline}` ({record.reason})"
    except UnreadableRecord as unreadable:
        champion = str(unreadable)
    newest = last_told(nights) or nights[0]
    rows = []
    for night in nights:
        point = night_point(root, night, {})
        mean = "" if point.mean is None else percent(point.mean)
        word = MARKS.get(point.word, point.word)
        rows.append([link(night_text(night.night), night.origin.flow_run_url), word, mean, night.outcome])
    return "\n\n".join(
        [
            f"## Nights of {name}",
            f"**{newest.sentence}**",
            f"{champion[0].upper()}{champion[1:]}.",
            markdown(("night", "verdict", "mean over tasks", "ended as"), rows),
        ]
    )


def at_work(root: Store) -> str:
    rows = [
        [f"`{row['run']}`", row["stage"], row["state"], progress_text(row)]
        for row in without_parts(list_runs_and_pipelines(root.uri))
    ]
    return markdown(("run", "stage", "state", "progress"), rows) if rows else "Nothing."


def upcoming_markdown(upcoming: Sequence[Upcoming]) -> str:
    rows = [[f"{each.due:%a %Y-%m-%d %H:%M} UTC", link(each.name, each.page)] for each in upcoming]
    if not rows:
        return "Nothing is scheduled. `vitline flows deploy --nightly`, or the switch on the page of a deployment, starts nights."
    return markdown(("due", "deployment"), rows)


def link(text: str, page: str | None) -> str:
    return f"[{text}]({page})" if page else text
