"""A night as Markdown, for its page in Prefect and MLflow, and as rows for a terminal."""

from collections.abc import Mapping
from typing import Any

from vitline.flows.nights.compare import MEAN, Difference, Differences
from vitline.flows.nights.judge import Comparison, other_night, short_name
from vitline.flows.nights.night_record import NightRecord
from vitline.infra.html.tables import markdown
from vitline.infra.html.text import cell, percent, points
from vitline.infra.night import night_name, night_text

COLUMNS = ("", "this night", "before", "difference", "±", "noise: seeds", "noise: images", "verdict")
NIGHT_COLUMNS = ("night", "name", "verdict", "sentence")
OTHERS, OTHER_COLUMNS = "Other protocols, without a verdict", ("", "this night", "champion", "last night")


def night_markdown(night: NightRecord) -> str:
    """The sentence, a table for each comparison, and what has changed."""
    parts = [f"**{night.sentence}**"]
    if night.verdict is not None:
        parts += [night.gate.reason] if night.gate else []
        parts += [_against_markdown(one) for one in night.verdict.against]
        parts += [f"### {OTHERS}\n\n{markdown(OTHER_COLUMNS, other_rows(night))}"] if night.others else []
        parts.append(footnote(night))
    return "\n\n".join(filter(None, parts))


def difference_rows(against: Comparison) -> list[list[str]]:
    """Rows of COLUMNS: percent, and differences in percentage points."""
    return [_row(difference) for difference in against.differences]


def other_rows(night: NightRecord) -> list[list[str]]:
    """Rows of OTHER_COLUMNS: percent."""
    return [
        [other.name, percent(other.value)]
        + [percent(other.before[who]) if who in other.before else "-" for who in OTHER_COLUMNS[2:]]
        for other in night.others
    ]


def change_rows(changes: Mapping[str, tuple[Any, Any]]) -> list[list[str]]:
    """What has changed: name, there, here."""
    return [[name, *map(cell, pair)] for name, pair in changes.items()]


def title(against: Comparison) -> str:
    text = f"Against {other_night(against)}: {against.word}"
    return f"{text}, the same models bit for bit" if against.identical else text


def notes(against: Differences, ours: str = "this night", theirs: str = "the other night") -> list[str]:
    """What the numbers of a comparison do not say."""
    lines = []
    if against.noise_of and not against.identical:
        lines.append(f"Noise of seeds from {against.noise_of}.")
    if against.detectable_difference is not None and not against.identical:
        needed = f" The wanted difference takes {against.seeds_needed} seeds a night." if against.seeds_needed else ""
        lines.append(
            f"A difference of {100 * against.detectable_difference:.1f} points is seen four times in five.{needed}"
        )
    other = [short_name(d.name) for d in against.differences if not d.paired and d.name != MEAN]
    if other:
        lines.append(f"Not paired, as there are no predictions for the same test images: {', '.join(other)}.")
    for names, where in ((against.only_ours, ours), (against.only_theirs, theirs)):
        if names:
            lines.append(f"Only in {where}, so not in the mean: {', '.join(map(short_name, names))}.")
    return lines


def footnote(night: NightRecord) -> str:
    if night.verdict is None or not night.verdict.against:
        return ""
    rest = (
        f"For the other scores, start the night again with the overrides nights.night={night.night:%Y-%m-%dT%H:%M} and "
        "nights.early_verdict=false. "
        if night.verdict.decided_after
        else ""
    )
    return (
        f"{rest}Percent and percentage points. Where nothing changes, one night in {1 / night.verdict.false_positive_rate:.0f} is called "
        f"better or worse; differences below {100 * night.verdict.smallest_effect:.1f} are called the same. "
        f"`vitline nights show {night_name(night.night)} --name {night.name}` makes this again from the records."
    )


def night_row(night: NightRecord) -> dict[str, Any]:
    """A row of `vitline nights ls`."""
    if night.outcome in ("running", "skipped"):
        word: str = night.outcome
    else:
        word = night.verdict.word if night.verdict else "not compared" if night.pipeline is None else "no verdict"
    return {
        "night": night_text(night.night),
        "name": night.name,
        "outcome": night.outcome,
        "verdict": word,
        "pipeline": night.pipeline,
        "sentence": night.sentence,
    }


def _against_markdown(against: Comparison) -> str:
    parts = [f"### {title(against)}"]
    if against.differences:
        parts.append(markdown(COLUMNS, difference_rows(against)))
    if lines := notes(against):
        parts.append(" ".join(lines))
    if rows := change_rows(against.changes):
        parts.append(markdown(("changed", "there", "here"), rows))
    return "\n\n".join(parts)


def _row(difference: Difference) -> list[str]:
    def half(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    name = short_name(difference.name) if "/" in difference.name else difference.name
    return [
        name, f"{100 * difference.ours:.1f}", f"{100 * difference.theirs:.1f}", points(difference.value),
        half(difference.half_width), half(difference.seeds_se), half(difference.images_se), difference.word,
    ]  # fmt: skip
