"""The tables of measured figures in the documents, written from the files that hold the measurements.

    .venv/bin/python tests/benchmarks/figures.py          # says which documents differ
    .venv/bin/python tests/benchmarks/figures.py --write  # writes them

A table stands between `<!-- figures: NAME -->` and `<!-- end figures -->`.
"""

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from recorded_scores import Measurement, measurements

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?<=<!-- figures: )([a-z-]+) -->\n(.*?)(?=<!-- end figures -->)", re.DOTALL)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def pairs(found: Measurement, task: str) -> list[tuple[int, float, float, str]]:
    """Seed, pre-trained, from scratch, and the learning rates that were chosen."""
    by = {(s.seed, s.init): s for s in found.scores if s.task == task}
    rows = []
    for seed in sorted({seed for seed, _ in by}):
        ours, scratch = by[seed, "pre-trained"], by[seed, "from scratch"]
        rows.append((seed, ours.top1, scratch.top1, f"{ours.peak_lr:g} / {scratch.peak_lr:g}"))
    return rows


def difference(rows: Sequence[tuple[int, float, float, str]]) -> str:
    """Mean difference in points, with its standard error over seeds."""
    points = [100 * (ours - scratch) for _, ours, scratch, _ in rows]
    error = f" ± {statistics.stdev(points) / len(points) ** 0.5:.1f}" if len(points) > 1 else ""
    return f"**{statistics.mean(points):+.1f}**{error}"


def tasks_of(found: Measurement) -> list[str]:
    return sorted({score.task for score in found.scores}, reverse=True)


def demo(found: Sequence[Measurement]) -> Iterator[str]:
    """A line for each machine and task."""
    yield "| task | machine | pre-trained, by seed | from scratch | difference | 16 x 16 pixels, logistic regression |"
    yield "|---|---|---|---|---|---|"
    for task in tasks_of(found[-1]):
        for each in found:
            rows = pairs(each, task)
            ours, scratch = (" / ".join(percent(row[i]) for row in rows) for i in (1, 2))
            baseline = f"{percent(each.baselines[task])} %" if task in each.baselines else ""
            yield f"| {task} | {each.machine} | {ours} % | {scratch} % | {difference(rows)} | {baseline} |"


def tables(found: Sequence[Measurement]) -> Iterator[str]:
    """Every run, with the settings that validation chose."""
    yield "| task | machine, commit, date | seed | pre-trained | from scratch | difference | learning rates chosen |"
    yield "|---|---|---|---|---|---|---|"
    for task in tasks_of(found[-1]):
        for each in found:
            where = f"{each.machine}, {each.commit}, {each.date}"
            for seed, ours, scratch, rates in pairs(each, task):
                gap = f"{100 * (ours - scratch):+.1f}"
                yield f"| {task} | {where} | {seed} | {percent(ours)} % | {percent(scratch)} % | {gap} | {rates} |"


TABLES: dict[str, Callable[[Sequence[Measurement]], Iterator[str]]] = {"demo": demo}


def with_figures(text: str) -> str:
    """A document with its tables as they should be."""
    return _BLOCK.sub(lambda m: f"{m[1]} -->\n" + "\n".join(TABLES[m[1]](measurements())) + "\n", text)


def documents() -> list[Path]:
    return sorted(
        p
        for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md"))
        if _BLOCK.search(p.read_text())
    )


def main() -> int:
    stale = [path for path in documents() if with_figures(path.read_text()) != path.read_text()]
    for path in stale:
        if "--write" in sys.argv[1:]:
            path.write_text(with_figures(path.read_text()))
        print(
            f"{path.relative_to(ROOT)}: {'written' if '--write' in sys.argv[1:] else 'differs from what was measured'}"
        )
    return 0 if "--write" in sys.argv[1:] else bool(stale)


if __name__ == "__main__":
    sys.exit(main())
