"""Lists of known names for error messages, with the name that was probably meant."""

from collections.abc import Iterable

MOST = 20


def matching(names: Iterable[str], wanted: str) -> list[str]:
    """The name that is `wanted`, else those that begin with it."""
    found = [name for name in names if name.startswith(wanted)]
    return [name for name in found if name == wanted] or found


def known_names_text(wanted: str, names: Iterable[str]) -> str:
    """`available: birds, digits and 3 more. Did you mean 'birds'?`"""
    known = sorted(set(names))
    shown = ", ".join(known[:MOST]) or "none yet"
    if len(known) > MOST:
        shown += f" and {len(known) - MOST:,} more"
    return f"available: {shown}.{did_you_mean(wanted, known)}"


def did_you_mean(wanted: str, names: Iterable[str]) -> str:
    """` Did you mean 'birds'?`, or an empty string if no name is similar."""
    found = nearest(wanted, names)
    return f" Did you mean {found!r}?" if found else ""


def nearest(wanted: str, names: Iterable[str]) -> str | None:
    """The name most similar to `wanted`, or None. Of dotted names it also compares the last parts."""
    from difflib import get_close_matches  # imported only when an error is shown

    known = list(names)
    if found := get_close_matches(wanted, known, 1, 0.75):
        return found[0]
    last: dict[str, str] = {}
    for name in known:
        last.setdefault(name.rpartition(".")[2], name)
    found = get_close_matches(wanted.rpartition(".")[2], last, 1, 0.75)
    return last[found[0]] if found else None
