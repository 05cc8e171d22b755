"""Saves and resumes a TrainState. A checkpoint is complete or invisible, and any number of workers can resume from it
(docs/design.md, "Checkpoints").

    checkpoints/step-000012000-a1/rank-00000-of-00002-<save>.safetensors   the tensors that rank 0 owns
                                  rank-00000-of-00002-<save>.json          name, shape, offsets, sha256 of each piece
                                  manifest.json                            created last, by rank 0
                                  rejected.json                            a mark: a reader found it damaged, and why
                                  lasting.json                             a mark: it is never deleted

Each rank writes a share of the tensors from reused host buffers, in a thread, and hashes while it writes. That thread runs
no collective: rank 0 waits for the JSON files of the other ranks in the store. Pickle is never read or written.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from infra.config import digest_of, flatten
from infra.storage import PreconditionFailed, Store, json_bytes
from vit.training.checkpoint_names import (
    FOLDER,
    LASTING,
    MANIFEST,
    MARK,
    CheckpointName,
    checkpoint_prefix,
    find_checkpoints,
    kept_checkpoints,
    no_checkpoint,
    parse_prefix,
)
from vit.training.checkpoint_names import list_checkpoints as list_checkpoints
from vit.training.guard.spike_guard import GuardRecord
from vit.training.sharding.slices import Place, fill, is_first_copy, is_sliced, own_slice, sliced_like
from vit.training.tensor_file import TensorPiece, read_tensors, write_tensors
from vit.training.train import TrainState
from vit.training.world import World

SCHEMA_VERSION = 1
log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint or published model cannot be read or written; the message names it."""


class CannotResume(CheckpointError):
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
    """The spike guard, where the recipe has one. Manifests of earlier versions lack it."""


class CheckpointFile(TypedDict):
    """The tensors that one rank wrote."""

    key: str
    pieces: list[TensorPiece]


class CheckpointManifest(PendingManifest):
    """The manifest of a checkpoint, without its digest."""

    world_size: int
    files: list[CheckpointFile]


class RankIndex(TypedDict):
    """`rank-<rank>-of-<ranks>-<save>.json`: the pieces that a rank wrote."""

    save: str
    """The save that they belong to."""
    pieces: list[TensorPiece]


@dataclass(frozen=True)
class CheckpointRef:
    """A committed checkpoint: its prefix in the run, and its manifest."""

    prefix: str
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest["step"]


def state_tensors(state: TrainState) -> dict[str, Tensor]:
    """Every tensor of the state by name: model/, average/, optim/<parameter>/<moment>.

    Names come from `named_parameters`, not from the optimizer's integer ids, which depend on the parameter groups.
    """
    tensors = {f"model/{name}": value for name, value in state.model.state_dict().items()}
    tensors |= {f"average/{name}": value for name, value in (state.average or {}).items()}
    for name, parameter in state.model.named_parameters():
        for moment, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optim/{name}/{moment}"] = value
    return tensors


def load_state_tensors(state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `state_tensors`, in place. Raises CheckpointError for a missing or extra tensor or a wrong shape."""
    expected = {f"model/{n}": v for n, v in state.model.state_dict().items()}
    expected |= {f"average/{n}": v for n, v in (state.average or {}).items()}
    parameters = {name: parameter for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    optim = {name: value for name, value in tensors.items() if name.startswith("optim/")}
    kept = {name.split("/")[1] for name in optim}
    missing = set(expected) - set(tensors) | ({f"optim/{n}" for n in set(parameters) - kept} if kept else set())
    stray = set(tensors) - set(expected) - set(optim) | {f"optim/{n}" for n in kept - set(parameters)}
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} tensors of the model, such as {sorted(missing)[:5]}. It belongs to "
            "another network; start a new run."
        )
    if stray:
        raise CheckpointError(
            f"The checkpoint has {len(stray)} tensors that the model does not have, such as {sorted(stray)[:5]}. It "
            "belongs to another network; start a new run."
        )
    for name, target in expected.items():
        if target.shape != tensors[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensors[name].shape)} in the checkpoint, but {tuple(target.shape)} in the "
                "model. The checkpoint belongs to another network; start a new run."
            )
        fill(target, tensors[name])
    for name, value in optim.items():
        _, parameter_name, moment = name.split("/")
        parameter = parameters[parameter_name]
        # Adam's step counter moves too: a fused optimizer keeps it on the device of the parameter.
        state.optimizer.state[parameter][moment] = sliced_like(parameter, value)


def owners(tensors: Mapping[str, Tensor], world_size: int) -> dict[str, int]:
    """The rank that writes each tensor: largest tensors first, each to the rank with the fewest bytes so far.

    Every rank computes the same assignment.
    """
    load = [0] * world_size
    owner = {}
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        owner[name] = load.index(min(load))
        load[owner[name]] += tensors[name].nbytes
    return owner


def share(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors that a rank writes: of those that every rank holds whole the ones that it owns, of the others its slice, unless
    another rank writes the same one."""
    sliced = {name: value for name, value in tensors.items() if is_sliced(value)}
    owner = owners({name: value for name, value in tensors.items() if name not in sliced}, world_size)
    writes = {name for name, value in sliced.items() if is_first_copy(value)}
    return {name: value for name, value in tensors.items() if name in writes or owner.get(name) == rank}


class CheckpointSaver:
    """Saves in the background. At most one save is in flight; the next call raises its error.

    Every rank calls `check_claim` before it writes. Before the commit, rank 0 calls it again, then `before_commit` (which
    seals the journal up to the step of the checkpoint), then `check_claim` once more. After the commit it calls `check_claim`, then
    `after_commit`, and deletes older files.
    An attempt that has lost its claim raises there and writes nothing more. `progress` is called as bytes are written. A step
    that `lasts` is never deleted. With `rewind_steps` one checkpoint is kept that is so many steps older than the newest.
    """

    def __init__(
        self,
        run: Store,
        *,
        attempt: int,
        rank: int = 0,
        world_size: int = 1,
        keep: int = 2,
        rewind_steps: int = 0,
        lasts: Callable[[int], bool] = lambda step: False,
        check_claim: Callable[[], object] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[], None] = lambda: None,
        progress: Callable[[], None] = lambda: None,
        peer_timeout_s: float = 600.0,
    ):
        self.run, self.attempt, self.rank, self.world_size, self.keep = run, attempt, rank, world_size, keep
        self.check_claim, self.before_commit, self.peer_timeout_s = check_claim, before_commit, peer_timeout_s
        self.progress, self.lasts, self.after_commit, self.rewind_steps = progress, lasts, after_commit, rewind_steps
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, state: TrainState, meta: SaveIdentity) -> None:
        """Copies this rank's share to host buffers and returns. A thread does the rest; `wait()` waits for it."""
        self.wait()
        tensors = state_tensors(state)
        mine = {name: self._buffered(name, value) for name, value in share(tensors, self.rank, self.world_size).items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        manifest: PendingManifest = {
            "schema_version": SCHEMA_VERSION,
            "step": state.step,
            "attempt": self.attempt,
            "guard": state.guard.record() if state.guard.is_on else None,
            **meta,
        }
        self.thread = threading.Thread(target=self._run, args=(mine, manifest), name="checkpoint-saver", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Returns once no save is in flight. Raises the error of the last save."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error of the last save as soon as there is one, without waiting."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _buffered(self, name: str, value: Tensor) -> tuple[Tensor, Place]:
        """A copy on the host of what this rank holds of a tensor, and its place."""
        own, place = own_slice(value.detach())
        buffer = self.buffers.get(name)
        if buffer is None:
            pinned = own.device.type == "cuda"
            buffer = self.buffers[name] = torch.empty(own.shape, dtype=own.dtype, pin_memory=pinned)
        return buffer.copy_(own, non_blocking=True), place

    def _run(self, mine: dict[str, tuple[Tensor, Place]], manifest: PendingManifest) -> None:
        try:
            self._write(mine, manifest)
        except BaseException as error:  # wait() raises it in the training loop, which ClaimLost must stop
            self.error = error

    def _write(self, mine: dict[str, tuple[Tensor, Place]], manifest: PendingManifest) -> None:
        self.check_claim()
        prefix = self._free_prefix(manifest["step"])
        if self.run.exists(f"{prefix}/manifest.json"):
            return  # this attempt committed it before its workers were restarted
        name = self._file(prefix, self.rank, manifest["save_id"])
        values, places = {n: value for n, (value, _) in mine.items()}, {n: place for n, (_, place) in mine.items()}
        pieces = write_tensors(self.run, f"{name}.safetensors", values, self.progress, places)
        self.run.write_json(f"{name}.json", RankIndex(save=manifest["save_id"], pieces=pieces))
        if self.rank == 0:
            files = self._await_peers(prefix, manifest["save_id"])
            if files is None:
                return
            self.check_claim()
            self.before_commit()
            self.check_claim()
            if self.lasts(manifest["step"]):
                self.run.write_json(
                    f"{prefix}/{LASTING}", {"schema_version": 1, "images_seen": manifest["images_seen"]}
                )
            commit(self.run, prefix, {**manifest, "world_size": self.world_size, "files": files})
            self.check_claim()
            self.after_commit()
            prune(self.run, self.keep, newest=prefix, rewind_steps=self.rewind_steps)

    def _free_prefix(self, step: int) -> str:
        """Where this attempt saves a step: beside its checkpoints of the step that are marked as damaged. Marks appear only
        before the training goes on, so every rank finds the same."""
        prefixes = (checkpoint_prefix(step, self.attempt, repetition) for repetition in itertools.count())
        return next(prefix for prefix in prefixes if not self.run.exists(f"{prefix}/{MARK}"))

    def _file(self, prefix: str, rank: int, save_id: str) -> str:
        """The name of a rank's files: that of the save, so a replaced worker that wakes overwrites no committed file."""
        return f"{prefix}/rank-{rank:05d}-of-{self.world_size:05d}-{save_id}"

    def _await_peers(self, prefix: str, save_id: str) -> list[CheckpointFile] | None:
        """The index of every rank, once all belong to this save; after a restart there may be indexes of an older save.

        None where the checkpoint is committed meanwhile, by workers of this attempt that were taken for dead: ranks that find
        it so write nothing, and are not waited for.
        """
        deadline = time.monotonic() + self.peer_timeout_s
        names = [self._file(prefix, rank, save_id) for rank in range(self.world_size)]
        indexes: dict[str, list[TensorPiece]] = {}
        while len(indexes) < len(names):
            for name in names:
                if name not in indexes and self.run.exists(f"{name}.json"):
                    index: RankIndex = self.run.read_json(f"{name}.json")
                    if index["save"] == save_id:
                        indexes[name] = index["pieces"]
            if len(indexes) < len(names):
                if self.run.exists(f"{prefix}/{MANIFEST}"):
                    return None
                if time.monotonic() > deadline:
                    late = [name for name in names if name not in indexes]
                    raise CheckpointError(
                        f"{self.run.uri_of(late[0])}.json did not appear within {self.peer_timeout_s} s; its rank has "
                        "failed or is too slow. See the errors and logs of the workers."
                    )
                time.sleep(0.05)
        return [{"key": f"{name}.safetensors", "pieces": indexes[name]} for name in names]


def commit(run: Store, prefix: str, manifest: CheckpointManifest) -> None:
    """Makes a checkpoint visible: creates its manifest, with a digest of the manifest. One that is there already stays."""
    with contextlib.suppress(PreconditionFailed):
        run.create(f"{prefix}/manifest.json", json_bytes({**manifest, "digest": digest_of(manifest)}))


def open_checkpoint(run: Store, prefix: str) -> CheckpointRef:
    """A committed checkpoint. Raises CheckpointError if its manifest is unreadable or was changed, and CannotResume if another
    version of vitline wrote it."""
    uri = run.uri_of(f"{prefix}/manifest.json")
    try:
        manifest: dict[str, Any] = dict(run.read_json(f"{prefix}/manifest.json"))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CheckpointError(f"{uri} cannot be read: {error}") from error
    version, whole = manifest.get("schema_version"), manifest.pop("digest", None) == digest_of(manifest)
    if version != SCHEMA_VERSION and (whole or isinstance(version, int)):
        raise CannotResume(
            f"{uri} has schema_version {version}, but this vitline reads {SCHEMA_VERSION}. {writer(run, prefix)} Resume the "
            "run with that version, or start a new run under another name. Nothing was deleted."
        )
    if not whole:
        raise CheckpointError(f"{uri} does not match the digest that it was written with.")
    return CheckpointRef(prefix, cast(CheckpointManifest, manifest))


def read_checkpoint(
    run: Store, ref: CheckpointRef, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Tensors by name, each checked against its sha256. Raises CheckpointError naming file and tensor."""
    tensors: dict[str, Tensor] = {}
    for file in ref.manifest["files"]:
        pieces = [piece for piece in file["pieces"] if wanted(piece["name"])]
        try:
            read = read_tensors(run, file["key"], pieces)
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointError(f"{run.uri_of(file['key'])}: {error}") from error
        for piece, value in zip(pieces, read, strict=True):
            place(tensors, piece, value)
    return tensors


def place(tensors: dict[str, Tensor], piece: TensorPiece, value: Tensor) -> None:
    """Puts a piece into its tensor at its offsets. A piece that is a whole tensor is used without copying."""
    shape, offsets = piece["global_shape"], piece["offsets"]
    if list(value.shape) == shape:
        tensors[piece["name"]] = value
        return
    whole = tensors.setdefault(piece["name"], torch.empty(shape, dtype=value.dtype))
    whole[tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))] = value


def writer(run: Store, prefix: str) -> str:
    """A sentence: which versions of vitline the attempt that saved a checkpoint ran, by its start records (`vit/run.py`)."""
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


def newest_checkpoint(
    run: Store, rejected: Callable[[str, CheckpointError], None]
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The newest undamaged checkpoint with its tensors, or None where there was never one. Every byte is checked.

    `rejected` is called with the prefix and the error of each damaged one. Those that are marked as damaged are read, too:
    the fault may have been on the way. Raises CannotResume where all are damaged, and for the checkpoint of another version.
    """
    found = find_checkpoints(run.list(FOLDER))
    reasons: list[str] = []
    for name in sorted({*found.committed, *found.marked}, reverse=True):
        if name not in found.committed:
            reasons.append(f"{name.prefix}: an earlier version of vitline found it damaged and deleted its manifest")
            continue
        try:
            return read_again(run, name, tries=1 if name in found.marked else 2)
        except CannotResume:
            raise
        except CheckpointError as error:
            rejected(name.prefix, error)
            reasons.append(f"{name.prefix}: {error}")
    reasons += [f"{prefix}: another version of vitline gave it this name" for prefix in found.unknown]
    if not reasons:
        return None
    raise CannotResume(
        f"None of the {len(reasons)} checkpoints of {run.uri} can be read, so the run stops instead of starting anew; nothing "
        f"was deleted. Restore one of them, or delete {run.uri_of(FOLDER.rstrip('/'))} to start at step 0. "
        + "; ".join(reasons)
    )


def read_again(run: Store, name: CheckpointName, tries: int) -> tuple[CheckpointRef, dict[str, Tensor]]:
    """A checkpoint with its tensors. One that seems damaged is read again, up to `tries` times in all."""
    for left in reversed(range(tries)):
        try:
            ref = open_checkpoint(run, name.prefix)
            return ref, read_checkpoint(run, ref)
        except CannotResume:
            raise
        except CheckpointError as error:
            if not left:
                raise
            log.warning("checkpoint %s seems damaged, reading it again: %s", run.uri_of(name.prefix), error)
    raise AssertionError("the last try returns or raises")


def mark_damaged(run: Store, prefix: str, error: CheckpointError) -> None:
    """Logs a damaged checkpoint and marks it, so that its step is saved again beside it. Its files stay as they are."""
    log.warning("checkpoint %s is damaged, trying an older one: %s", run.uri_of(prefix), error)
    if run.exists(f"{prefix}/{MANIFEST}"):  # else another attempt has deleted the checkpoint since it was listed
        run.write_json(f"{prefix}/{MARK}", {"schema_version": 1, "at": time.time(), "reason": str(error)})


def resume(
    run: Store, state: TrainState, meta: RunIdentity, world: World, check_claim: Callable[[], object] = lambda: None
) -> CheckpointRef | None:
    """Restores `state` from the newest undamaged checkpoint, the same one on every rank. Returns None if there is none.

    Raises CannotResume on every rank if there are checkpoints and all are damaged, or the newest was written by another
    version of vitline or has another recipe, corpus or class map than `meta`. Before something is marked, rank 0 calls
    `check_claim`, which raises in an attempt that has lost its claim.
    """
    return _restore(run, state, world, lambda: _resumable(run, meta, check_claim))


def start_from(run: Store, step: int, state: TrainState, meta: RunIdentity, world: World) -> CheckpointRef:
    """Restores `state` from an undamaged checkpoint of `step` of another run, the same one on every rank. Writes nothing there.

    Raises CannotResume on every rank if there is none, or it has another recipe, corpus or class map than `meta`, which is that of
    the other run.
    """
    found = _restore(run, state, world, lambda: _of_step(run, step, meta))
    assert found is not None
    return found


def _restore(
    run: Store, state: TrainState, world: World, find: Callable[[], tuple[CheckpointRef, dict[str, Tensor]] | None]
) -> CheckpointRef | None:
    """Loads on every rank the checkpoint that `find()` returns on rank 0. Every rank raises CannotResume where it does."""
    found, refusal = None, None
    if world.rank == 0:
        try:
            found = find()
        except CannotResume as error:
            refusal = error
    if world.agree(int(refusal is not None)):
        raise refusal or CannotResume(f"rank 0 refused to resume {run.uri}; its error gives the reason.")
    name = CheckpointName(*(world.agree(part) for part in (_name(found[0]) if found else CheckpointName(-1, -1))))
    if name.step < 0:
        return None
    ref, tensors = found or read_again(run, name, tries=2)
    restore(state, ref, tensors)
    return ref


def restore(state: TrainState, ref: CheckpointRef, tensors: Mapping[str, Tensor]) -> None:
    """Makes `state` that of a checkpoint."""
    load_state_tensors(state, tensors)
    state.step = ref.step
    state.guard.load(ref.manifest.get("guard"))


def _resumable(
    run: Store, meta: RunIdentity, check_claim: Callable[[], object]
) -> tuple[CheckpointRef, dict[str, Tensor]] | None:
    """The newest undamaged checkpoint of a run, or None. Marks the damaged ones, and takes the mark off the one returned."""

    def rejected(prefix: str, error: CheckpointError) -> None:
        check_claim()
        mark_damaged(run, prefix, error)

    found = newest_checkpoint(run, rejected)
    if found is not None:
        ref = found[0]
        check_same_run(run.uri_of(ref.prefix), ref.manifest, meta)
        if run.exists(f"{ref.prefix}/{MARK}"):
            log.warning("checkpoint %s is marked as damaged, but every byte is right", run.uri_of(ref.prefix))
            check_claim()
            run.delete(f"{ref.prefix}/{MARK}")
    return found


def _of_step(run: Store, step: int, meta: RunIdentity) -> tuple[CheckpointRef, dict[str, Tensor]]:
    """The newest undamaged checkpoint of a step. Raises CannotResume if there is none."""
    reasons = []
    for name in find_checkpoints(run.list(FOLDER)).unmarked:
        if name.step == step:
            try:
                ref, tensors = read_again(run, name, tries=2)
            except CannotResume:
                raise
            except CheckpointError as error:
                reasons.append(f"{name.prefix}: {error}")
                continue
            check_same_run(run.uri_of(ref.prefix), ref.manifest, meta)
            return ref, tensors
    raise CannotResume("; ".join([no_checkpoint(run, step), *reasons]))


def _name(ref: CheckpointRef) -> CheckpointName:
    name = parse_prefix(ref.prefix)
    assert name is not None
    return name


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


# Must be equal in a checkpoint and in the run that resumes from it.
SAME = ("recipe", "corpus_digest", "class_map_digest")


def prune(run: Store, keep: int, newest: str, rewind_steps: int = 0) -> None:
    """Deletes all but the newest `keep` checkpoints, and files that killed saves left for steps before `newest`.

    Unfinished saves of later attempts stay: an attempt that is suspended here may have a successor when it wakes. Checkpoints
    that are marked as damaged do not count, and go once `keep` newer ones are there; lasting ones stay (`kept_checkpoints`). The
    manifest of a checkpoint is deleted first, so that a partly deleted checkpoint is invisible.
    """
    keys = run.list(FOLDER)
    kept, found, last = (
        kept_checkpoints(keys, keep, rewind_steps) | {newest},
        find_checkpoints(keys),
        parse_prefix(newest),
    )
    old = [
        name.prefix
        for name in found.committed
        # A branch may have pinned it since.
        if name.prefix not in kept and not find_checkpoints(run.list(f"{name.prefix}/")).pins
    ]
    for prefix in old:
        run.delete(f"{prefix}/{MANIFEST}")
    for key in keys:
        prefix = key.rsplit("/", 1)[0]
        name = parse_prefix(prefix)
        left = name and last and name < last and name.attempt <= last.attempt and name not in found.committed
        if prefix not in kept and (prefix in old or left):
            run.delete(key)
