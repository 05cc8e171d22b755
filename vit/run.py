"""One training run on one rank: store, state, batches, journal and checkpoints around `train()`.

Works the same in a Ray Train worker and in a plain process (`World()` of one); knows neither Ray nor MLflow.
"""

import contextlib
import io
import logging
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from data_prep.shard_format import Manifest, load_class_names, load_manifest
from infra.provenance import versions
from infra.runs.claims import ClaimHolder, ClaimLost
from infra.runs.journal import Journal
from infra.runs.run_state import RunState, write_state
from infra.runs.stopping import StopPoller
from infra.storage import Store, open_store
from infra.system_metrics import SystemSampler
from vit.devices import devices_text
from vit.input.batches import Batch, eval_batches, train_batches
from vit.input.image_contract import ImageContract
from vit.inspection.inspect_run import inspect_run
from vit.models.network import Network
from vit.published import adapt, load_model, publish
from vit.run_spec import RunSpec
from vit.training.checkpoint import CheckpointSaver, list_checkpoints, resume
from vit.training.evaluate import evaluate
from vit.training.train import Metrics, TrainState, initial_state, torch_seed, train, with_optimizer
from vit.training.world import World

log = logging.getLogger(__name__)
PROGRESS_EVERY_S = 1.0


@dataclass
class TrainingRun:
    """One rank's part of one attempt. `execute()` ends with `state.json` written, or raises."""

    run: Store
    attempt: int
    world: World

    def __post_init__(self) -> None:
        self.spec = RunSpec.model_validate(self.run.read_json("config.json"))
        self.config, self.recipe = self.spec.config, self.spec.config.recipe
        self.claim = ClaimHolder(self.run, self.attempt)
        self.corpus = open_store(self.config.corpus)

    def execute(self) -> RunState | None:
        """Trains from the newest checkpoint to the end; None if another attempt has taken the run over."""
        if self.world.agree(self._lost_claim()):
            log.warning("run=%s attempt=%d: the claim is another attempt's; this one stops", self.run.uri, self.attempt)
            return None
        # Counted before anything that may fail each time, so that no failure is repeated without end.
        if self.world.agree(self._count_start()):
            return self._end("failed", {"reason": self._reason_of_restarts()})
        manifest = load_manifest(self.corpus)
        if manifest.digest != self.spec.inputs["corpus"]:
            raise RuntimeError(
                f"{self.corpus.uri} has digest {manifest.digest[:12]}, this run was started on "
                f"{self.spec.inputs['corpus'][:12]}. The corpus was replaced; start a new run."
            )
        state = self._initial(manifest)
        meta = self._meta(manifest)
        if (restored := resume(self.run, state, meta, self.world)) is not None:
            log.info("resumed at step=%d from %s", state.step, restored.prefix)
        if self.world.rank == 0:
            self.claim.check()
            write_state(self.run, "running", self.attempt, from_step=state.step)
        with (
            StopPoller(self.run, self.attempt) as stop,
            Reporter(
                self.run,
                self.attempt,
                self.recipe.total_steps,
                active=self.world.rank == 0,
                devices=devices_text(self.world.device.type, self.world.size),
            ) as reporter,
            system_metrics(self.run, self.attempt, self.world, reporter.journal, lambda: state.step),
        ):
            outcome = self._train(state, manifest, meta, stop, reporter)
            detail: dict[str, Any] = {"step": state.step, "images_seen": self._images(state)}
            if outcome == "finished":
                detail |= self._finish(state, manifest, reporter)
            elif outcome != "diverged" and stop.by:
                detail["reason"] = stop.by
        return self._end(outcome, detail)

    def _train(
        self, state: TrainState, manifest: Manifest, meta: Mapping[str, Any], stop: StopPoller, reporter: "Reporter"
    ) -> RunState:
        saver = CheckpointSaver(
            self.run,
            attempt=self.attempt,
            rank=self.world.rank,
            world_size=self.world.size,
            keep=self.config.execution.keep_checkpoints,
            check_claim=self.claim.check,
            before_commit=reporter.seal,
        )
        # Tells the saves of this start from what an earlier start of the group may have left half-written.
        start_id = self.world.agree(int(time.time() * 1000))

        def save(state: TrainState) -> None:
            saver.save(state, {**meta, "save_id": f"{start_id}-{state.step}", "images_seen": self._images(state)})

        with self._batches(state.step, manifest) as batches:
            outcome = train(
                state,
                save_first_inputs(self.run, batches) if state.step == 0 and self.world.rank == 0 else batches,
                self.recipe,
                self.config.execution,
                self.world,
                report=reporter.record,
                save=save,
                stop_requested=stop.asked,
            )
        saver.wait()
        return outcome

    def _initial(self, manifest: Manifest) -> TrainState:
        if self.config.init_model is None:
            return initial_state(self.recipe, manifest.num_classes, self.world.device)
        source = load_model(self.config.init_model)
        if source.digest != self.spec.inputs["init_model"]:
            raise RuntimeError(f"{source.uri} was replaced since this run was started; start a new run.")
        torch.manual_seed(torch_seed(self.recipe.seed, "init"))
        network = adapt(source.network, self.recipe.model, manifest.num_classes, self.recipe.model.head_bias_init)
        return with_optimizer(network.to(self.world.device).train(), self.recipe)

    def _batches(self, step: int, manifest: Manifest):
        return train_batches(
            self.corpus,
            manifest,
            self.config.split,
            self.recipe.input,
            seed=self.recipe.seed,
            start_step=step,
            num_steps=self.recipe.total_steps,
            rank=self.world.rank,
            world_size=self.world.size,
            micro_batch_size=self.config.execution.micro_batch_size,
            threads=self.config.execution.decode_threads,
            decoded_cache_bytes=self.config.execution.decoded_cache_bytes,
        )

    def _eval_batches(self, split: str, manifest: Manifest):
        return eval_batches(
            self.corpus,
            manifest,
            split,
            self.recipe.input.augment,
            batch_size=self.config.execution.micro_batch_size,
            rank=self.world.rank,
            world_size=self.world.size,
            threads=self.config.execution.decode_threads,
        )

    def _finish(self, state: TrainState, manifest: Manifest, reporter: "Reporter") -> dict[str, Any]:
        """Scores the held-out split on all ranks and publishes the model from rank 0."""
        detail: dict[str, Any] = {}
        network = state.evaluation_model()
        split = self.config.val_split
        if split is not None and split in manifest.splits:
            with self._eval_batches(split, manifest) as batches:
                score = evaluate(
                    network,
                    batches,
                    manifest.splits[split].num_rows,
                    loss=self.recipe.loss,
                    precision=self.recipe.precision,
                    world=self.world,
                )
            reporter.record(state.step, {"val/top1": score.top1, "val/loss": score.loss})
            detail |= {
                "val_top1": score.top1,
                "val_examples": score.num_examples,
                "val_majority_fraction": score.majority_fraction,
            }
        if self.world.rank == 0:
            self.claim.check()
            detail["model"] = publish(
                open_store(self.spec.models),
                self.config.name,
                self.spec.run_key.rsplit("-", 1)[1],
                network,
                ImageContract(decode=manifest.decode_policy, evaluation=self.recipe.input.augment),
                load_class_names(self.corpus),
                {
                    "run_key": self.spec.run_key,
                    "config_digest": self.config.config_digest,
                    "corpus_digest": manifest.digest,
                    "steps": state.step,
                    "images_seen": self._images(state),
                },
            )
            detail["inspection"] = self._inspect(network, manifest)
        return detail

    def _inspect(self, network: Network, manifest: Manifest) -> list[str]:
        """The paper's figures of a pre-trained network."""
        num_images = self.config.execution.inspect_images
        if self.config.stage != "pretrain" or num_images == 0:
            return []
        split = self.config.val_split if self.config.val_split in manifest.splits else self.config.split
        augment, size = self.recipe.input.augment, min(num_images, self.config.execution.micro_batch_size)
        with eval_batches(self.corpus, manifest, str(split), augment, batch_size=size) as batches:
            return inspect_run(self.run, network, batches, num_images, title=self.spec.run_key)

    def _meta(self, manifest: Manifest) -> dict[str, Any]:
        return {
            "run_key": self.spec.run_key,
            "recipe": self.recipe.model_dump(mode="json"),
            "config_digest": self.config.config_digest,
            "corpus_digest": manifest.digest,
            "class_map_digest": manifest.class_map_digest,
        }

    def _images(self, state: TrainState) -> int:
        return state.step * self.recipe.input.global_batch_size

    def _lost_claim(self) -> int:
        try:
            self.claim.check()
        except ClaimLost:
            return 1
        return 0

    def _count_start(self) -> int:
        """Notes that the group started here (rank 0); 1 if it did so too often without a new checkpoint."""
        if self.world.rank != 0:
            return 0
        newest = next(iter(list_checkpoints(self.run)), "none").rsplit("/", 1)[-1]
        prefix = f"starts/a{self.attempt}-from-{newest}-"
        starts = self.run.list(prefix)
        note = {"host": platform.node(), "at": time.time(), "world_size": self.world.size, "versions": versions()}
        self.run.write_json(f"{prefix}{len(starts):03d}.json", note)
        return int(len(starts) > self.config.execution.max_restarts_without_progress)

    def _reason_of_restarts(self) -> str:
        errors = [self.run.read_json(key) for key in self.run.list(f"errors/a{self.attempt}-")]
        # Of one failure the first error is the cause; the others are peers whose connection broke.
        first = min(errors, key=lambda e: e["at"], default=None)
        cause = f"rank {first['rank']}: {first['error']}" if first else "workers were lost without an error"
        limit = self.config.execution.max_restarts_without_progress
        return f"{limit} restarts brought no new checkpoint; first {cause}"

    def _end(self, outcome: RunState, detail: Mapping[str, Any]) -> RunState:
        if self.world.rank == 0:
            self.claim.check()
            write_state(self.run, outcome, self.attempt, **detail)
        return outcome


class Reporter:
    """Rank 0's metrics: journal, and a small progress file for whoever looks on. Silent on other ranks."""

    def __init__(self, run: Store, attempt: int, total_steps: int, active: bool, devices: str = ""):
        self.devices = devices
        self.run, self.total_steps = run, total_steps
        self.folder = tempfile.TemporaryDirectory(prefix="vitline-journal-") if active else None
        self.journal = Journal(run, attempt, Path(self.folder.name)) if self.folder else None
        self.started, self.shown = time.monotonic(), 0.0
        self.first_step: int | None = None
        # A thread writes the progress, the latest when it comes to it: a store that is away for a while may not hold
        # up a step, and a file that somebody looks at may not end a training.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self.latest: dict[str, Any] | None = None
        self.written: dict[str, Any] | None = None
        self.writing: Future[None] | None = None

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()
        self._write_progress()
        if self.journal is not None and self.folder is not None:
            self.journal.close()
            self.folder.cleanup()

    def record(self, step: int, metrics: Metrics) -> None:
        if self.journal is None:
            return
        self.journal.record(metrics, step)
        now = time.monotonic()
        if self.first_step is None:
            self.first_step, self.started = step, now
        if "train/loss" in metrics and (now - self.shown > PROGRESS_EVERY_S or step == self.total_steps):
            self.shown = now
            done, loss = step - self.first_step, metrics["train/loss"]
            self.latest = {
                "step": step,
                "total_steps": self.total_steps,
                "loss": loss if math.isfinite(loss) else None,  # JSON has no NaN; the journal keeps it
                "images_per_s": metrics["throughput/images_per_s"],
                "devices": self.devices,
                "remaining_s": (self.total_steps - step) * (now - self.started) / done if done else None,
            }
            if self.writing is None or self.writing.done():
                self.writing = self.thread.submit(self._write_progress)

    def _write_progress(self) -> None:
        progress = self.latest
        if progress is self.written:
            return
        try:
            self.run.write_json("progress.json", progress)
            self.written = progress
        except (OSError, RuntimeError):
            log.warning("progress.json was not written; the next one will tell", exc_info=True)

    def seal(self) -> None:
        if self.journal is not None:
            self.journal.seal()


@contextlib.contextmanager
def system_metrics(
    run: Store, attempt: int, world: World, journal: Journal | None, step: Callable[[], int]
) -> Iterator[None]:
    """Samples this machine while the context is open, from one process of each machine: into rank 0's journal where
    that is at hand, else into a journal of the machine's own."""
    if world.local_rank:
        yield
        return
    with contextlib.ExitStack() as stack:
        if journal is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vitline-journal-"))
            journal = Journal(run, attempt, Path(folder), writer=f"node-{world.node_rank}")
            stack.callback(close_quietly, journal)
        stack.enter_context(
            SystemSampler(journal.record, world.node_rank, step, lambda: gpu_memory_used_bytes(world.device))
        )
        yield


def close_quietly(journal: Journal) -> None:
    """Closes a journal whose last records are not worth a training that is done."""
    try:
        journal.close()
    except Exception:
        log.warning("the last system metrics of this machine are lost", exc_info=True)


def gpu_memory_used_bytes(device: torch.device) -> int | None:
    """By all processes on this device; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def save_first_inputs(run: Store, batches):
    """Passes `batches` on, and writes the first images just as the model gets them to `inputs.png`."""
    first = next(batches)
    run.write("inputs.png", contact_sheet(first[0]))
    yield first
    yield from batches


def contact_sheet(batch: Batch, columns: int = 12, rows: int = 4) -> bytes:
    """A PNG grid of the first images of a batch."""
    images = batch.images[batch.valid][: columns * rows].numpy()
    side, gap = images.shape[1], 4
    sheet = np.full((rows * (side + gap) + gap, columns * (side + gap) + gap, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        y, x = (gap + (index // columns) * (side + gap), gap + (index % columns) * (side + gap))
        sheet[y : y + side, x : x + side] = image
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG")
    return buffer.getvalue()
