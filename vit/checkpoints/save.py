"""Saves a TrainState. A checkpoint is complete or invisible, and any number of workers can resume from it.

    checkpoints/step-000012000-a1/rank-00000-of-00002-<save>.safetensors   the tensors that rank 0 owns
                                  rank-00000-of-00002-<save>.json          name, shape, offsets, sha256 of each piece
                                  manifest.json                            created last, by rank 0
                                  rejected.json                            a mark: a reader found it damaged, and why
                                  permanent.json                             a mark: it is never deleted
                                  best.json                                a mark: it has the best validation score
                                  pinned-<run key>.json                    a mark: a branch needs it

Each rank, or of many the first ones, writes a share of the tensors from reused host buffers, in a thread, and hashes while it writes.
That thread runs no collective: rank 0 waits for the JSON files of the other ranks in the store. Pickle is never read or written.
"""

import itertools
import threading
import time
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from vitline.infra.runs.handle import Run
from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import (
    SCHEMA_VERSION,
    CheckpointFile,
    PendingManifest,
    SaveIdentity,
    WeightsError,
    commit,
)
from vitline.vit.checkpoints.names import (
    DAMAGED,
    FOLDER,
    MANIFEST,
    PERMANENT,
    Retention,
    checkpoint_prefix,
    find_checkpoints,
    parse_prefix,
)
from vitline.vit.checkpoints.shares import num_writers, share
from vitline.vit.checkpoints.state_tensors import state_tensors
from vitline.vit.checkpoints.tensor_file import TensorPiece, write_tensors
from vitline.vit.training.loop import TrainState
from vitline.vit.training.sharding.slices import ShardPlace, local_shard
from vitline.vit.training.world import World

PEER_TIMEOUT_S = 600.0
"""How long rank 0 waits for the other ranks to write their share."""


class RankIndex(TypedDict):
    """`rank-<rank>-of-<ranks>-<save>.json`: the pieces that a rank wrote."""

    save: str
    """The save that they belong to."""
    pieces: list[TensorPiece]


def start_id(world: World) -> int:
    """Equal on all ranks, each of which must call it; with it in their ids, saves of this start of the ranks differ from unfinished
    ones of an earlier start."""
    return world.broadcast_int(int(time.time() * 1000))


class CheckpointSaver:
    """Saves in the background. At most one save is in flight; the next call raises its error.

    Every rank checks its lease before it writes. Before the commit, rank 0 checks it again, calls `before_commit` (which seals the
    journal up to the step of the checkpoint, and marks the best of those before it), and checks it once more. After the
    commit it checks it, calls `after_commit`, and deletes older files.
    An attempt that has lost its lease raises there and writes nothing more. Written bytes count as progress of the run.
    """

    def __init__(
        self,
        held: Run,
        world: World,
        retention: Retention,
        before_commit: Callable[[], object] = lambda: None,
        after_commit: Callable[[], object] = lambda: None,
    ):
        self.held, self.run, self.rank, self.world_size = held, held.store, world.rank, world.size
        self.num_writers = world.size
        self.retention, self.before_commit, self.after_commit = retention, before_commit, after_commit
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, state: TrainState, meta: SaveIdentity) -> None:
        """Copies this rank's share to host buffers and returns. A thread does the rest; `wait()` waits for it."""
        self.wait()
        tensors = state_tensors(state)
        self.num_writers = num_writers(tensors, self.world_size)
        if self.rank >= self.num_writers:
            return
        mine = {name: self._buffered(name, value) for name, value in share(tensors, self.rank, self.world_size).items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        manifest: PendingManifest = {
            "schema_version": SCHEMA_VERSION,
            "step": state.step,
            "attempt": self.held.attempt,
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

    def _buffered(self, name: str, value: Tensor) -> tuple[Tensor, ShardPlace]:
        """A copy on the host of what this rank holds of a tensor, and its place."""
        own, place = local_shard(value.detach())
        buffer = self.buffers.get(name)
        if buffer is None:
            pinned = own.device.type == "cuda"
            buffer = self.buffers[name] = torch.empty(own.shape, dtype=own.dtype, pin_memory=pinned)
        return buffer.copy_(own, non_blocking=True), place

    def _run(self, mine: dict[str, tuple[Tensor, ShardPlace]], manifest: PendingManifest) -> None:
        try:
            self._write(mine, manifest)
        except BaseException as error:  # wait() raises it in the training loop, which LeaseLost must stop
            self.error = error

    def _write(self, mine: dict[str, tuple[Tensor, ShardPlace]], manifest: PendingManifest) -> None:
        self.held.check()
        prefix = self._free_prefix(manifest["step"])
        if self.run.exists(f"{prefix}/manifest.json"):
            return  # this attempt committed it before its workers were restarted
        name = self._file(prefix, self.rank, manifest["save_id"])
        values, places = {n: value for n, (value, _) in mine.items()}, {n: place for n, (_, place) in mine.items()}
        pieces = write_tensors(self.run, f"{name}.safetensors", values, self.held.progress, places)
        self.run.write_json(f"{name}.json", RankIndex(save=manifest["save_id"], pieces=pieces))
        if self.rank == 0:
            files = self._await_peers(prefix, manifest["save_id"])
            if files is None:
                return
            self.held.check()
            self.before_commit()
            self.held.check()
            if self.retention.is_permanent(manifest["step"]):
                self.run.write_json(
                    f"{prefix}/{PERMANENT}", {"schema_version": 1, "images_seen": manifest["images_seen"]}
                )
            commit(self.run, prefix, {**manifest, "world_size": self.world_size, "files": files})
            self.held.check()
            self.after_commit()
            prune(self.run, self.retention, newest=prefix)

    def _free_prefix(self, step: int) -> str:
        """Where this attempt saves a step: beside its checkpoints of the step that are marked as damaged. Marks appear only
        before the training continues, so every rank finds the same."""
        prefixes = (checkpoint_prefix(step, self.held.attempt, repetition) for repetition in itertools.count())
        return next(prefix for prefix in prefixes if not self.run.exists(f"{prefix}/{DAMAGED}"))

    def _file(self, prefix: str, rank: int, save_id: str) -> str:
        """The name of a rank's files: that of the save, so a replaced worker that wakes overwrites no committed file."""
        return f"{prefix}/rank-{rank:05d}-of-{self.world_size:05d}-{save_id}"

    def _await_peers(self, prefix: str, save_id: str) -> list[CheckpointFile] | None:
        """The index of every rank, once all belong to this save; after a restart there may be indexes of an older save.

        None where the checkpoint is committed meanwhile, by workers of this attempt that were taken for dead: ranks that find
        it so write nothing, and are not waited for.
        """
        deadline = time.monotonic() + PEER_TIMEOUT_S
        names = [self._file(prefix, rank, save_id) for rank in range(self.num_writers)]
        indexes: dict[str, list[TensorPiece]] = {}
        while len(indexes) < len(names):
            written = set(self.run.list(f"{prefix}/"))
            for name in names:
                if name not in indexes and f"{name}.json" in written:
                    index: RankIndex = self.run.read_json(f"{name}.json")
                    if index["save"] == save_id:
                        indexes[name] = index["pieces"]
            if len(indexes) < len(names):
                if f"{prefix}/{MANIFEST}" in written:
                    return None
                if time.monotonic() > deadline:
                    late = [name for name in names if name not in indexes]
                    raise WeightsError(
                        f"{self.run.uri_of(late[0])}.json did not appear within {PEER_TIMEOUT_S:.0f} s; its rank has "
                        "failed or is too slow. See the errors and logs of the workers."
                    )
                time.sleep(0.05)
        return [{"key": f"{name}.safetensors", "pieces": indexes[name]} for name in names]


def prune(run: Store, retention: Retention, newest: str) -> None:
    """Deletes the checkpoints that `retention` does not keep, and files that killed saves left for steps before `newest`.

    Unfinished saves of later attempts stay: an attempt that is suspended here may have a successor when it wakes. Checkpoints
    that are marked as damaged do not count, and go once enough newer ones are there. The manifest of a checkpoint is deleted first,
    so that a partly deleted checkpoint is invisible.
    """
    keys = run.list(FOLDER)
    kept, found, last = retention.kept(keys) | {newest}, find_checkpoints(keys), parse_prefix(newest)
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
