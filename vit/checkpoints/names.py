"""The checkpoints of a run by their keys: committed, marked as damaged, to be kept.

Imports no torch: `collect-garbage` uses it, too.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vitline.infra.storage import Store

FOLDER = "checkpoints/"
MANIFEST, DAMAGED = "manifest.json", "rejected.json"
PERMANENT = "permanent.json"
"""Marks a checkpoint that is never deleted (`execution.keep_every_images`)."""
BEST = "best.json"
"""Marks the checkpoint of the best validation score, with the score (`execution.keep_best`)."""
_PIN = re.compile(r"^pinned-(.+)\.json$")
"""Marks a checkpoint that a branch, a run of this key, needs until it has one of its own."""
_PREFIX = re.compile(r"^checkpoints/step-(\d{9})-a(\d+)(?:-r([1-9]\d*))?$")


class CheckpointName(NamedTuple):
    """The name of a checkpoint. Names sort as the checkpoints do, from old to new."""

    step: int
    attempt: int
    repetition: int = 0
    """How often the attempt saved the step before: those checkpoints are marked as damaged."""

    @property
    def prefix(self) -> str:
        again = f"-r{self.repetition}" if self.repetition else ""
        return f"{FOLDER}step-{self.step:09d}-a{self.attempt}{again}"


class Found(NamedTuple):
    """The checkpoints in a listing, from new to old."""

    committed: list[CheckpointName]
    """Those that have a manifest."""
    marked: list[CheckpointName]
    """Those that were found to be damaged."""
    permanent: list[CheckpointName]
    """Those that are never deleted, while nobody deletes their mark; the best one among them."""
    best: list[CheckpointName]
    """The one of the best validation score; two where a kill came between the marks."""
    pins: dict[str, list[CheckpointName]]
    """Those that a branch needs, by the run key of the branch."""
    unknown: list[str]
    """Prefixes of manifests whose names this version of vitline does not give."""

    @property
    def unmarked(self) -> list[CheckpointName]:
        return [name for name in self.committed if name not in self.marked]


def checkpoint_prefix(step: int, attempt: int, repetition: int = 0) -> str:
    return CheckpointName(step, attempt, repetition).prefix


def parse_prefix(prefix: str) -> CheckpointName | None:
    """The name that a prefix has; None for a folder that is no checkpoint's."""
    match = _PREFIX.match(prefix)
    return CheckpointName(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def find_checkpoints(keys: Iterable[str]) -> Found:
    """The checkpoints that some keys of a run belong to."""
    files: dict[str, list[CheckpointName]] = {MANIFEST: [], DAMAGED: [], PERMANENT: [], BEST: []}
    pins: dict[str, list[CheckpointName]] = {}
    unknown = []
    for key in keys:
        prefix, _, file = key.rpartition("/")
        name = parse_prefix(prefix)
        if name and file in files:
            files[file].append(name)
        elif name and (pin := _PIN.match(file)):
            pins.setdefault(pin[1], []).append(name)
        elif file == MANIFEST and prefix.startswith(FOLDER):
            unknown.append(prefix)
    committed, marked = (sorted(files[file], reverse=True) for file in (MANIFEST, DAMAGED))
    best, permanent = (
        [name for name in sorted({*names}, reverse=True) if name in committed and name not in marked]
        for names in (files[BEST], files[PERMANENT] + files[BEST])
    )
    return Found(committed, marked, permanent, best, pins, sorted(unknown))


def pin_key(name: CheckpointName, branch: str) -> str:
    """Key of the mark by which a branch, a run of this key, keeps a checkpoint."""
    return f"{name.prefix}/pinned-{branch}.json"


def list_checkpoints(run: Store) -> list[str]:
    """Prefixes of the committed checkpoints of a run that are not marked as damaged, newest first (step, then attempt)."""
    return [name.prefix for name in find_checkpoints(run.list(FOLDER)).unmarked]


def newest_step(run: Store) -> int | None:
    """The step of the newest checkpoint of a run that is not marked as damaged; None if there is none."""
    return max((name.step for name in find_checkpoints(run.list(FOLDER)).unmarked), default=None)


def checkpoint_steps(run: Store) -> list[int]:
    """The steps of the checkpoints of a run that are not marked as damaged, from old to new."""
    return sorted({name.step for name in find_checkpoints(run.list(FOLDER)).unmarked})


def no_checkpoint(run: Store, step: int) -> str:
    """A sentence: there is no such checkpoint, and which there are."""
    key, steps = run.uri.rstrip("/").rpartition("/")[2], checkpoint_steps(run)
    kept = f"it keeps those of steps {', '.join(f'{s:,}' for s in steps)}" if steps else "it keeps none"
    return (
        f"{key} has no checkpoint of step {step:,}; {kept} (`vitline runs show {key}`). Name one of them; "
        "`execution.keep_every_images` keeps some for ever."
    )


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run are kept."""

    keep: int = 2
    """The newest so many that are not marked as damaged."""
    rewind_steps: int = 0
    """One more that is so many steps older than the newest: a spike at any later step can go back to it."""
    keep_every_images: int | None = None
    save_every_steps: int = 1
    global_batch_size: int = 1

    def is_permanent(self, step: int) -> bool:
        """Whether the checkpoint of a step is never deleted: of the regular ones the first at or after each multiple of
        `keep_every_images`. It follows from the step alone, so a resumed run keeps the same ones."""
        if self.keep_every_images is None or step % self.save_every_steps:
            return False
        images, before = step * self.global_batch_size, (step - self.save_every_steps) * self.global_batch_size
        return images // self.keep_every_images > before // self.keep_every_images

    def kept(self, keys: Iterable[str]) -> set[str]:
        """Prefixes of the checkpoints to keep: the newest, those marked as damaged that are newer than all but these, permanent ones,
        and those that a branch needs. Where there are fewer, the newest marked ones make up the number."""
        found = find_checkpoints(keys)
        kept = found.unmarked[: self.keep]
        if len(kept) < self.keep:
            kept += found.marked[: self.keep - len(kept)]
        elif kept:
            kept += [name for name in found.marked if name > kept[self.keep - 1]]
        if self.rewind_steps and found.unmarked:
            kept += [name for name in found.unmarked if name.step <= found.unmarked[0].step - self.rewind_steps][:1]
        pinned = [name for names in found.pins.values() for name in names if name in found.unmarked]
        return {name.prefix for name in [*kept, *found.permanent, *pinned]}
