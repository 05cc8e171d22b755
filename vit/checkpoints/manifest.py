"""What a checkpoint says of itself: its manifest, and the errors of one that cannot be used."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from vitline.infra.config import digest_of, flatten
from vitline.infra.storage import Store, json_bytes
from vitline.vit.checkpoints.names import MANIFEST, parse_prefix
from vitline.vit.checkpoints.tensor_file import TensorPiece
from vitline.vit.training.guard.spike_guard import GuardRecord

SCHEMA_VERSION = 1
SAME = ("recipe", "corpus_digest", "class_map_digest")
"""Must be equal in a checkpoint and in the run that resumes from it."""


class WeightsError(RuntimeError):
    """A checkpoint or published model cannot be read or written; the message names it."""


class CannotResume(WeightsError):
    """A run has checkpoints, but none that it may resume from. Every rank raises it."""


class RunIdentity(TypedDict):
    """The run in the manifest of its checkpoints; `resume` refuses the checkpoint of another one."""

    run_key: str
    recipe: dict[str, Any]
    """The recipe as JSON."""
    config_digest: str
    corpus_digest: str
    class_map_digest: str


class SaveIdentity(RunIdentity):
    """A run and one of its saves."""

    save_id: str
    """Equal on all ranks; distinguishes the save from an unfinished one of an earlier start of the worker group."""
    images_seen: int


class PendingManifest(SaveIdentity):
    """The manifest of a checkpoint before the other ranks have written their files."""

    schema_version: int
    step: int
    attempt: int
    guard: GuardRecord | None
    """The spike guard, where the recipe has one."""


class CheckpointFile(TypedDict):
    """The tensors that one rank wrote."""

    key: str
    pieces: list[TensorPiece]


class CheckpointManifest(PendingManifest):
    """The manifest of a checkpoint, without its digest."""

    world_size: int
    files: list[CheckpointFile]


@dataclass(frozen=True)
class CheckpointRef:
    """A committed checkpoint: its prefix in the run, and its manifest."""

    prefix: str
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def pieces(self) -> list[TensorPiece]:
        """Of all files."""
        return [piece for file in self.manifest["files"] for piece in file["pieces"]]


def commit(run: Store, prefix: str, manifest: CheckpointManifest) -> None:
    """Makes a checkpoint visible: creates its manifest, with a digest of the manifest. One that is there already stays."""
    run.create_if_absent(f"{prefix}/{MANIFEST}", json_bytes({**manifest, "digest": digest_of(manifest)}))


def open_checkpoint(run: Store, prefix: str) -> CheckpointRef:
    """A committed checkpoint. Raises WeightsError if its manifest is unreadable or was changed, and CannotResume if another
    version of vitline wrote it."""
    uri = run.uri_of(f"{prefix}/{MANIFEST}")
    try:
        manifest: dict[str, Any] = dict(run.read_json(f"{prefix}/{MANIFEST}"))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise WeightsError(f"{uri} cannot be read: {error}") from error
    version, whole = manifest.get("schema_version"), manifest.pop("digest", None) == digest_of(manifest)
    if version != SCHEMA_VERSION and (whole or isinstance(version, int)):
        raise CannotResume(
            f"{uri} has schema_version {version}, but this vitline reads {SCHEMA_VERSION}. {writer(run, prefix)} Resume the "
            "run with that version, or start a new run under another name. Nothing was deleted."
        )
    if not whole:
        raise WeightsError(f"{uri} does not match the digest that it was written with.")
    return CheckpointRef(prefix, cast(CheckpointManifest, manifest))


def writer(run: Store, prefix: str) -> str:
    """A sentence: which versions of vitline the attempt that saved a checkpoint ran, by its start records (`vit/run/training_run.py`)."""
    name = parse_prefix(prefix)
    attempt = name.attempt if name else 0
    known = set()
    for key in run.list(f"starts/a{attempt}-from-"):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # an odd record says nothing
            found = run.read_json(key)["versions"]
            known.add(
                f"vitline {found['vitline']}" + (f" (commit {found['commit'][:12]})" if "commit" in found else "")
            )
    ran = " and ".join(sorted(known))
    return f"Attempt {attempt} of the run wrote it with {ran or 'another version of vitline'}."


def check_same_run(uri: str, manifest: Mapping[str, object], meta: Mapping[str, object]) -> None:
    """Raises CannotResume listing the differences in recipe, corpus and class map."""
    theirs, ours = (flatten({k: m.get(k) for k in SAME}) for m in (manifest, meta))
    changed = [
        f"{k}: {theirs.get(k)!r} -> {ours.get(k)!r}" for k in sorted(theirs | ours) if theirs.get(k) != ours.get(k)
    ]
    if changed:
        raise CannotResume(
            f"{uri} belongs to another run: {'; '.join(changed[:8])}. "
            "Start a new run for the changed recipe, or resume this run with its own."
        )
