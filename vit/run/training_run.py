"""One training run on one rank: from its lease to `state.json`. `training/fit.py` has the order in which it writes.

It works the same in a Ray Train worker and in a plain process (a `World()` of size 1), and knows neither Ray nor MLflow.
"""

import logging
import platform
import time
from dataclasses import dataclass, replace

import torch

from vitline.infra.provenance import cpu_model, versions
from vitline.infra.runs.handle import Run
from vitline.infra.runs.run_state import RunState, StateDetail, write_state
from vitline.infra.runs.watchdog import Watchdog
from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import CannotResume
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.corpora.training_sources import sources_of
from vitline.vit.cost.micro_batch import micro_batch_that_fits
from vitline.vit.cost.training_memory import memory_record, reset_peak_memory
from vitline.vit.input.batches import LoaderResources
from vitline.vit.input.decoding.how_many import decode_processes
from vitline.vit.run.devices import devices_text
from vitline.vit.run.hooks import RunHooks
from vitline.vit.run.run_spec import MIXTURE_KEY, RunSpec, StartRecord
from vitline.vit.run.start_state import StartState
from vitline.vit.training.fit import FitPlan, RunIO, fit
from vitline.vit.training.loop import TrainState
from vitline.vit.training.reporter import Reporter, system_metrics
from vitline.vit.training.world import World

log = logging.getLogger(__name__)


@dataclass
class TrainingRun:
    """One rank's part of one attempt. `execute()` returns after rank 0 has written `state.json`, or raises."""

    run: Store
    attempt: int
    world: World

    def __post_init__(self) -> None:
        self.spec = RunSpec.model_validate(self.run.read_json("config.json"))
        self.config, self.recipe = self.spec.config, self.spec.config.recipe
        execution, rank = self.config.execution, self.world.rank
        watchdog = Watchdog(
            self.run.uri, self.attempt, execution.progress_timeout_s, who=f"rank{rank}", fields={"rank": rank}
        )
        self.held = Run(self.run, self.attempt, follows_stops=rank == 0, watchdog=watchdog)
        self.start = StartState(self.held, self.spec, self.world)
        self.loading = LoaderResources(
            rank,
            self.world.size,
            threads=execution.decode_threads,
            shard_cache_dir=execution.shard_cache_dir,
            shard_cache_bytes=execution.shard_cache_bytes,
        )

    def execute(self) -> RunState | None:
        """Trains from the newest checkpoint to the end. Returns None if another attempt holds the lease.

        A process that makes no progress for `execution.progress_timeout_s` is killed (`Watchdog`).
        """
        with self.held:
            try:
                return self._execute()
            except CannotResume as error:  # a restart of the worker group would not help
                log.error("%s", error)
                return self._end("failed", {"reason": str(error)[:4000]})

    def _execute(self) -> RunState | None:
        if self.world.broadcast_int(not self.held.holds()):
            log.warning(
                "run=%s attempt=%d: another attempt holds the lease; this one stops", self.run.uri, self.attempt
            )
            return None
        # Count the start before anything that could fail every time, so that no failure repeats without end.
        if self.world.broadcast_int(self._count_start()):
            limit, cause = self.config.execution.max_restarts_without_progress, self.held.first_error(self._newest())
            return self._end("failed", {"reason": f"{limit} restarts brought no new checkpoint; {cause}"})
        state = self.start.newest()
        if self.world.rank == 0:
            self.held.check()
            if (mixture := self.start.corpora.record()) and not self.run.exists(MIXTURE_KEY):
                self.run.write_json(MIXTURE_KEY, mixture)
            write_state(self.run, "running", self.attempt, from_step=state.step)
        micro_batch = micro_batch_that_fits(state, self.recipe, self.config.execution, self.world)
        reset_peak_memory(self.world)
        with (
            Reporter(
                self.held,
                min(self.spec.pause_at_step or self.recipe.total_steps, self.recipe.total_steps),
                active=self.world.rank == 0,
                devices=devices_text(self.world.device.type, self.world.size),
                from_step=0 if self.recipe.spike_guard.action == "rewind" else state.step,
            ) as reporter,
            system_metrics(self.held, self.world, reporter.journal, lambda: state.step),
        ):
            hooks = RunHooks(self.held, self.start, reporter, self.loading, micro_batch)
            io = RunIO(
                stopped=self.held.stopped,
                reached=reporter.reached,
                report=reporter.record,
                spike=hooks.spike_pages,
                seen=hooks.first_inputs,
                save_every=hooks.save_every,
                rewind=self.start.rewind,
            )
            outcome, reason = fit(self._plan(micro_batch), state, self.world, io, hooks.validate_every())
            detail = self._detail(state, hooks.images(state), micro_batch)
            if outcome == "finished":
                detail |= hooks.at_end(state)
            elif reason := reason or (self.held.stopped_by if outcome not in ("failed", "diverged") else None):
                detail["reason"] = reason
        return self._end(outcome, detail)

    def _plan(self, micro_batch: int) -> FitPlan:
        execution, corpora = self.config.execution, self.start.corpora
        processes = decode_processes(
            execution.decode_processes,
            threads=execution.decode_threads,
            lanes=self.recipe.input.num_lanes // self.world.size,
            in_memory=any(part.store.uri.startswith("memory://") for part in corpora.parts),
        )
        return FitPlan(
            recipe=self.recipe,
            execution=execution,
            sources=sources_of(corpora, self.config.split),
            loading=replace(
                self.loading,
                processes=processes,
                decoded_cache_bytes=execution.decoded_cache_bytes,
                read_ahead_bytes=execution.read_ahead_bytes,
            ),
            micro_batch=micro_batch,
            epoch=sum(part.num_rows(self.config.split) for part in corpora.parts),
            pause_at_step=self.spec.pause_at_step,
            pause_at=self.spec.pause_at,
        )

    def _detail(self, state: TrainState, images: int, micro_batch: int) -> StateDetail:
        detail: StateDetail = {"step": state.step, "images_seen": images}
        if state.guard.spikes:
            detail["spikes"] = [spike["step"] for spike in state.guard.spikes]
        return detail | memory_record(state.model, self.recipe, self.config.execution, micro_batch, self.world)

    def _newest(self) -> str:
        """The name of the newest checkpoint, or `none`."""
        return next(iter(list_checkpoints(self.run)), "none").rsplit("/", 1)[-1]

    def _count_start(self) -> int:
        """Records a start of the worker group (rank 0). 1 if there were too many since the newest checkpoint, else 0."""
        if self.world.rank != 0:
            return 0
        device = self.world.device
        record: StartRecord = {
            "host": platform.node(),
            "at": time.time(),
            "world_size": self.world.size,
            "versions": versions(),
            "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        }
        return int(self.held.count_start(self._newest(), record) > self.config.execution.max_restarts_without_progress)

    def _end(self, outcome: RunState, detail: StateDetail) -> RunState:
        return self.held.end(outcome, detail) if self.world.rank == 0 else outcome
