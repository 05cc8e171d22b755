"""The verdict of a night: better, same, worse or broken, than the champion and than the last night. Pure functions, no store."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vitline.flows.nights.compare import Differences, Word, compare
from vitline.flows.nights.night_scores import NightScores
from vitline.infra.html.text import and_list, points, shortened_list
from vitline.infra.night import Night, night_text
from vitline.infra.records import StoredRecord
from vitline.infra.runs.run_state import RunState

FALSE_POSITIVE_RATE = 0.02
"""The probability that a night in which nothing has changed is called better or worse than the champion or the last night: one in
fifty nights. Both comparisons share it."""
WORST_FIRST: tuple[Word, ...] = ("broken", "worse", "better", "same", "not compared")
CUT: Mapping[str, str] = {
    "out_of_time": "it reached its deadline",
    "preempted": "it was stopped",
    "suspended": "it was suspended",
    "cancelled": "it was cancelled",
}
"""Ends of a night that was cut short, in words."""
NAMED_CHANGES = 4


class Comparison(Differences):
    """A night compared with the champion or the last night."""

    who: Literal["champion", "last night"]
    key: str
    """Pipeline of the other night."""
    night: Night | None
    changes: dict[str, tuple[Any, Any]]
    """What the scores may depend on and what differs, by dotted name: there, here. None where there is nothing."""


class Verdict(StoredRecord):
    """What is said of a night in the morning."""

    schema_version: int = 1
    word: Word
    """The worst word of the comparisons."""
    sentence: str
    against: tuple[Comparison, ...] = ()
    smallest_effect: float = 0.0
    """Smaller differences, as fractions, are called the same."""
    false_positive_rate: float = FALSE_POSITIVE_RATE
    noise_nights: tuple[str, ...] = ()
    """Keys of the earlier pipelines from which the noise was estimated."""
    decided_after: str = ""
    """The scored part of a night that was decided early: `7 of 19 tasks and 31 % of the cost`."""


def judge(
    night: NightScores,
    champion: NightScores | None,
    last_night: NightScores | None,
    earlier: Sequence[NightScores] = (),
    *,
    wanted: float,
    level: float = FALSE_POSITIVE_RATE,
) -> Verdict:
    """Compares a night with the champion and the last one. `earlier` nights, oldest first, tell the noise of seeds; `wanted` is the
    smallest difference of interest, a fraction; `level` is that of all comparisons together. An early look has a smaller one; its
    intervals are those of a night all the same."""
    references: list[tuple[Literal["champion", "last night"], NightScores]] = []
    if champion is not None and champion.key != night.key:
        references.append(("champion", champion))
    if last_night is not None and last_night.key not in {other.key for _, other in references}:
        references.append(("last night", last_night))
    known = {"smallest_effect": wanted, "noise_nights": tuple(one.key for one in earlier)}
    if not references:
        return Verdict(
            word="not compared",
            sentence="Not compared: there is neither a champion nor an earlier whole night.",
            **known,
        )
    against = tuple(
        Comparison(
            who=who,
            key=other.key,
            night=other.night,
            changes=changes(other.facts, night.facts),
            **dict(
                compare(
                    night,
                    other,
                    earlier,
                    level=level / len(references),
                    wanted=wanted,
                    shown_level=FALSE_POSITIVE_RATE / len(references),
                )
            ),
        )
        for who, other in references
    )
    word = min((one.word for one in against), key=WORST_FIRST.index)
    sentence = ". ".join(_clause(one, wanted) for one in against)
    return Verdict(word=word, sentence=f"{sentence}. {_changed(against[-1])}", against=against, **known)


def incomplete(state: RunState, reason: str, part: str = "") -> Verdict:
    """The verdict of a night that did not finish: broken, or cut and not compared. `part` is what it was doing."""
    where = f" in its {part}" if part else ""
    if state in CUT:
        sentence = f"Not compared: the night was cut{where}, because {CUT[state]}. {reason}"
        return Verdict(word="not compared", sentence=sentence.strip())
    return Verdict(word="broken", sentence=f"Broken: the night {state}{where}. {reason}".strip())


def changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, by name: there, here."""
    names = sorted({*theirs, *ours})
    return {name: (theirs.get(name), ours.get(name)) for name in names if theirs.get(name) != ours.get(name)}


def short_name(metric: str) -> str:
    """`tasks/digits/top1` -> `digits`, `fewshot/pets/10shot/top1` -> `pets 10shot`"""
    return " ".join(metric.split("/")[1:-1]) or metric


def other_night(against: Comparison) -> str:
    """`the champion (night of 2026-11-20 02:00 UTC)`"""
    when = f"night of {night_text(against.night)}" if against.night else against.key
    return f"{'the champion' if against.who == 'champion' else 'last night'} ({when})"


def _clause(against: Comparison, wanted: float) -> str:
    who = other_night(against)
    if not against.differences:
        return f"Not compared with {who}: they have no task in common"
    whole, num = against.whole, sum(d.name != against.whole.name for d in against.differences)
    scope = f"over {num} tasks" if num else f"on {short_name(whole.name)}"
    if against.collapsed:
        names = and_list([short_name(name) for name in against.collapsed])
        return (
            f"Broken: no better than the majority class on {names}, unlike {who}; {points(whole.value)} points {scope}"
        )
    if against.identical:
        return f"The same models as {who}, bit for bit"
    if whole.half_width is None:
        return (
            f"Not compared with {who}: {points(whole.value)} points {scope}, but the noise between seeds is not known; wait "
            "for nights of the same request, or set nights.num_seeds to 3 where every night trains anew"
        )
    text = f"{points(whole.value)} points {scope} (±{100 * whole.half_width:.1f})"
    apart = [d for d in against.differences if d.word in ("better", "worse") and d is not whole]
    tasks = ""
    for word in dict.fromkeys(d.word for d in apart):
        tasks += f", {word} on {and_list([f'{short_name(d.name)} {points(d.value)}' for d in apart if d.word == word])}"
    if against.word != "same":
        return f"{against.word.capitalize()} than {who}: {text}{tasks}"
    # What could not have been seen is no proof that nothing has changed.
    sees_wanted = against.detectable_difference is not None and against.detectable_difference <= wanted
    opening = "The same as" if sees_wanted and abs(whole.value) < wanted else "Within noise of"
    return f"{opening} {who}: {text}{_blind(against, wanted)}"


def _blind(against: Comparison, wanted: float) -> str:
    """What this comparison could not see, where it is more than the wanted difference."""
    if against.detectable_difference is None or against.detectable_difference <= wanted:
        return ""
    needed = f", and the wanted {100 * wanted:.1f} with {against.seeds_needed} seeds" if against.seeds_needed else ""
    return f"; a difference of {100 * against.detectable_difference:.1f} or more would be seen{needed}"


def _changed(against: Comparison) -> str:
    """What has changed since that night, in one sentence."""
    names = [
        name if _long(pair) else f"{name} {_value(pair[0])} to {_value(pair[1])}"
        for name, pair in against.changes.items()
    ]
    if not names:
        return "Nothing is known to have changed."
    return f"Changed since: {shortened_list(names, NAMED_CHANGES)}."


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return text[:7] if len(text) in (40, 64) else text


def _long(pair: tuple[Any, Any]) -> bool:
    return any(len(_value(value)) > 30 for value in pair)
