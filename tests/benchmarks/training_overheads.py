"""What a training costs beside its steps, on CPUs: journal, checkpoints, a second worker, Ray Train, memory over many steps.

    .venv/bin/python tests/benchmarks/training_overheads.py journal-and-checkpoints [--rounds 5]
    .venv/bin/python tests/benchmarks/training_overheads.py stall [--rounds 5]
    .venv/bin/python tests/benchmarks/training_overheads.py workers [--rounds 5]
    .venv/bin/python tests/benchmarks/training_overheads.py ray [--rounds 5]
    .venv/bin/python tests/benchmarks/training_overheads.py memory [--steps 10000]
    .venv/bin/python tests/benchmarks/training_overheads.py servers

`journal-and-checkpoints`: the loop of 100 steps (Ti/16 at 224 px, batch 4, one thread) bare; with a journal, logged every 10 steps; and
with that and a checkpoint at step 100 whose writing is waited for. Bars: 0.5 % and 2 %.
`stall`: how long a checkpoint of B/16 with the moments of AdamW holds the loop (`save` returns; a thread writes) against torch.save of the
same tensors, both into one folder of a disk; on a GPU if there is one. Bar: 0.2.
`workers`: two processes that sum their gradients by gloo against two that know nothing of each other (S/16, micro-batch 16, one thread
each): seconds of a step. Bar: 0.85 of the throughput.
`ray`: steps of a whole training (Ti/16) in a worker of Ray Train against those of the same training in a plain process; and the seconds
from the start of a worker's function to its first step. Bars: 2 %, and 10 s.
`memory`: unique memory of a training of the digits after every tenth of its steps. Bar: flat.
`servers`: processor time of the services of a local stack in a minute of a training on it, without Ray's workers and the job. Bar: 5 % of
two cores.
Sides take turns within a round; ratios have median and 95 % interval.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from input import interval

from vitline.data_prep.examples import presets
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.infra.config import replace
from vitline.infra.local.stack import processes_of, stack_environment, start_stack, stop_stack
from vitline.infra.runs.handle import Run
from vitline.infra.runs.journal import Journal, read_journal
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.settings import inherited_environment
from vitline.infra.storage import Store, open_store
from vitline.vit.checkpoints.names import Retention
from vitline.vit.checkpoints.save import CheckpointSaver
from vitline.vit.checkpoints.state_tensors import state_tensors
from vitline.vit.config import ExecutionConfig, OptimConfig, TrainConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.variants import vit_config
from vitline.vit.recipes import digits
from vitline.vit.run.hooks import RunHooks
from vitline.vit.run.resolved import resolve
from vitline.vit.run.run_spec import read_starts
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.loop import Hook, initial_state, train
from vitline.vit.training.world import World

CLASSES = 10
IDENTITY = {"run_key": "r", "recipe": {}, "config_digest": "", "corpus_digest": "", "class_map_digest": ""}
PREPARE_DIGITS = (
    "from vitline.data_prep.sources import presets; from vitline.data_prep.prepare.job import prepare; "
    "from vitline.infra.settings import Settings;"
    "prepare([presets.digits()], Settings().root)"
)


def recipe(variant: str, batch: int, steps: int) -> TrainRecipe:
    return TrainRecipe(
        model=vit_config(variant),
        input=InputConfig(global_batch_size=batch, num_lanes=2, augment=AugmentConfig(image_size_px=224)),
        optim=OptimConfig(warmup_steps=1),
        total_steps=steps,
    )


def batches(size: int, first: int, stop: int) -> Iterator[list[Batch]]:
    """The same random images in every step, so that nothing is decoded."""
    torch.manual_seed(0)
    batch = Batch(
        images=torch.randint(0, 256, (size, 224, 224, 3), dtype=torch.uint8),
        labels=torch.randint(0, CLASSES, (size,)),
        valid=torch.ones(size, dtype=torch.bool),
        first_slot=0,
        num_examples=size,
    )
    for _ in range(first, stop):
        yield [batch]


def leased(store: Store) -> Run:
    return Run(store, acquire_lease(store, "measured", job_state=lambda job: None, owner="benchmark").attempt)


def journal_and_checkpoints(rounds: int, steps: int = 100) -> None:
    torch.set_num_threads(1)
    config, execution, world = recipe("ti16", 4, 10**6), ExecutionConfig(log_every_steps=10), World()
    state = initial_state(config, CLASSES, world.device)

    def seconds(report: Callable[..., None], hooks: list[Hook] = [], after: Callable[[], None] = lambda: None) -> float:  # noqa: B006
        begin = state.step
        started = time.perf_counter()
        train(
            state, batches(4, begin, begin + steps + 1), config, execution, world,
            report=report, hooks=hooks, stop_requested=lambda: "paused" if state.step - begin >= steps else None,
        )  # fmt: skip
        after()
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as root:
        run = open_store(root)
        journal = Journal(run, 1)
        saver = CheckpointSaver(leased(run), world, Retention(), journal.seal)
        save = Hook(
            10**6, lambda s: saver.save(s, {**IDENTITY, "save_id": f"{s.step}", "images_seen": 0}), on_stop="run"
        )
        write = lambda step, metrics: journal.record(metrics, step)  # noqa: E731
        seconds(lambda *_: None)  # warms up
        ratios: dict[str, list[float]] = {"journal": [], "journal and a checkpoint": []}
        for number in range(rounds):
            bare = seconds(lambda *_: None)
            noted = seconds(write, after=journal.seal)
            saved = seconds(write, [save], after=saver.wait)
            again = seconds(lambda *_: None)
            base = (bare + again) / 2
            ratios["journal"].append(noted / base)
            ratios["journal and a checkpoint"].append(saved / base)
            print(
                f"round {number}: bare {bare:.2f} and {again:.2f} s, journal {noted:.2f} s, with a checkpoint {saved:.2f} s"
            )
        journal.close()
    for name, found in ratios.items():
        print(
            name,
            "{:.4f} [{:.4f}, {:.4f}] of the bare loop".format(*interval(found)),
            [round(each, 4) for each in found],
        )


def stall(rounds: int) -> None:
    config, world = recipe("b16", 2, 10**6), World.current()
    state = initial_state(config, CLASSES, world.device)
    train(
        state,
        batches(2, 0, 2),
        config,
        ExecutionConfig(),
        world,
        report=lambda *_: None,
        stop_requested=lambda: "paused",
    )
    ratios = []
    with tempfile.TemporaryDirectory() as root:
        saver = CheckpointSaver(leased(open_store(root)), world, Retention(1))
        for number in range(rounds + 1):
            os.sync()  # neither waits for what the other has written
            started = time.perf_counter()
            torch.save(state_tensors(state), Path(root) / "torch.pt")
            saved = time.perf_counter()
            saver.save(state, {**IDENTITY, "save_id": f"{number}", "images_seen": 0})
            held = time.perf_counter() - saved
            saver.wait()
            written, theirs = time.perf_counter() - saved, saved - started
            print(
                f"save {number}: torch.save {theirs:.2f} s; ours holds the loop for {held:.3f} s and is done after {written:.2f} s"
            )
            ratios.append(held / theirs)
            state.step += 1
    tensors = state_tensors(state).values()
    print(f"{sum(each.nbytes for each in tensors) / 1e9:.2f} GB, device {world.device}, first save {ratios[0]:.3f}")
    print(
        "held over torch.save {:.3f} [{:.3f}, {:.3f}]".format(*interval(ratios[1:])),
        [round(each, 3) for each in ratios],
    )


def worker(rank: int, size: int, port: int, steps: int, answers: "multiprocessing.Queue[float]") -> None:
    """Seconds of a step of S/16 at micro-batch 16, of one of `size` processes."""
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    world, config = World.current() if size > 1 else World(), recipe("s16", 16 * size, steps)
    state, at = initial_state(config, CLASSES, world.device), list[float]()
    train(
        state, batches(16, 0, steps), config, ExecutionConfig(log_every_steps=1), world,
        report=lambda *_: at.append(time.perf_counter()),
    )  # fmt: skip
    answers.put(statistics.median(b - a for a, b in itertools.pairwise(at[1:])))


def workers(rounds: int, steps: int = 6) -> None:
    context = multiprocessing.get_context("spawn")

    def step_s(size: int) -> float:
        """Of two processes: one group of two, or two groups of one."""
        answers, port = context.Queue(), 20_000 + int(time.time()) % 20_000
        processes = [
            context.Process(target=worker, args=(rank if size > 1 else 0, size, port, steps, answers))
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        found = [answers.get() for _ in processes]
        for process in processes:
            process.join()
        return statistics.mean(found)

    ratios = []
    for number in range(rounds):
        alone, together = step_s(1), step_s(2)
        ratios.append(alone / together)
        print(
            f"round {number}: a step takes {alone:.2f} s in independent processes, {together:.2f} s together: {ratios[-1]:.3f}"
        )
    print("throughput of two workers {:.3f} [{:.3f}, {:.3f}] of two independent processes".format(*interval(ratios)))


def prepared(root: str) -> Store:
    prepare([presets.digits()], root)
    return corpus_store(open_store(root), presets.digits())


def started(root: str, config: TrainConfig) -> tuple[Store, int]:
    spec = resolve(config, root).spec()
    run = open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", spec.model_dump(mode="json"))
    lease = acquire_lease(run, spec.run_key, job_state=lambda job: "failed", owner="benchmark")
    return run, lease.attempt


def step_times(run: Store) -> tuple[float, float]:
    """Median seconds of a step, and seconds from the start of the worker's function to its first step."""
    at = sorted(record.timestamp_ms for record in read_journal(run) if record.key == "train/loss")
    begun = min(start["at"] for start in read_starts(run))
    return statistics.median(b - a for a, b in itertools.pairwise(at[3:])) / 1e3, at[0] / 1e3 - begun


def in_process(root: str, config: TrainConfig, by_ray: bool) -> None:
    run, attempt = started(root, config)
    if by_ray:
        from vitline.vit.ray_jobs import train_driver

        train_driver.drive(run, attempt)
    else:
        torch.set_num_threads(1)
        TrainingRun(run, attempt, World()).execute()


def ray(rounds: int, steps: int = 60) -> None:
    context, ratios, firsts = multiprocessing.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as root:
        corpus = prepared(root)
        for number in range(rounds):
            found = {}
            for by_ray in (False, True):
                config = TrainConfig(
                    name="by-ray" if by_ray else "plain",
                    corpus=corpus.uri,
                    recipe=replace(recipe("ti16", 4, steps), seed=number),
                    execution=ExecutionConfig(
                        log_every_steps=1, save_every_steps=10**6, inspect_images=0, device="cpu"
                    ),
                )
                process = context.Process(target=in_process, args=(root, config, by_ray))
                process.start()
                process.join()
                found[by_ray] = step_times(open_store(root).child(f"runs/{resolve(config, root).spec().run_key}"))
            ratios.append(found[True][0] / found[False][0])
            firsts.append(found[True][1])
            print(
                f"round {number}: a step takes {found[False][0]:.3f} s in a plain process, {found[True][0]:.3f} s by Ray Train: "
                f"{ratios[-1]:.3f}; first step by Ray after {found[True][1]:.2f} s"
            )
    print("a step by Ray Train {:.3f} [{:.3f}, {:.3f}] of a plain one".format(*interval(ratios)))
    print(f"first step {statistics.median(firsts):.2f} s after the worker's function, most {max(firsts):.2f} s")


def memory(steps: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        corpus, (base, execution) = prepared(root), (digits.pretrain_recipe(), ExecutionConfig(inspect_images=0))
        small = replace(
            base, **{"total_steps": steps, "input.global_batch_size": 16, "model.depth": 1, "model.embed_dim": 32}
        )
        config = TrainConfig(
            name="long", corpus=corpus.uri, recipe=small, execution=replace(execution, log_every_steps=steps // 10)
        )
        run, attempt = started(root, config)
        seen = []

        look = Hook(steps // 10, lambda state: seen.append(psutil.Process().memory_full_info().uss / 1e6))
        with patch.object(RunHooks, "validate_every", lambda hooks: [look]):
            TrainingRun(run, attempt, World()).execute()
    print(f"unique memory over {steps:,} steps, MB:", ", ".join(f"{each:.1f}" for each in seen))


def services_cpu_s(directory: Path) -> Counter[str]:
    """CPU-seconds of each service; of Ray without what the training runs in."""
    found: Counter[str] = Counter()
    for name, processes in processes_of(directory).items():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                # Ray names its agents of this node like its workers.
                of_ray = line.startswith("ray::") and "Agent" not in line
                if not of_ray and "vitline.vit.ray_jobs.train_driver" not in line and "watchdog" not in line:
                    found[name] += sum(process.cpu_times()[:2])
    return found


def servers(settle_s: float = 45.0, seconds: float = 60.0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "stack"
        try:
            start_stack(directory, log_dir=Path(folder) / "logs", num_cpus=2, ends_with_caller=True, announce=print)
            env = inherited_environment((), **stack_environment(directory))
            subprocess.run([sys.executable, "-c", PREPARE_DIGITS], env=env, check=True)
            long = ["--set", "recipe.total_steps=100000", "--set", "execution.num_workers=2"]
            command = [
                sys.executable,
                "-m",
                "vitline.flows.cli.main",
                "pretrain",
                "run",
                "--corpus",
                "digits",
                "--recipe",
                "digits",
            ]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            training = subprocess.Popen([*command, *long], env=env, **quiet)
            time.sleep(settle_s)
            before = services_cpu_s(directory)
            time.sleep(seconds)
            used = services_cpu_s(directory) - before
            assert training.poll() is None, "the training has ended"
            training.terminate()
            training.wait(60)
        finally:
            stop_stack(directory)
    print(", ".join(f"{name} {100 * each / seconds:.2f} %" for name, each in used.items()), "of a core")
    print(f"all {100 * sum(used.values()) / seconds / 2:.2f} % of two cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["journal-and-checkpoints", "stall", "workers", "ray", "memory", "servers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    asked = parser.parse_args()
    if asked.what == "memory":
        memory(asked.steps)
    elif asked.what == "servers":
        servers()
    else:
        of_rounds = {"journal-and-checkpoints": journal_and_checkpoints, "stall": stall, "workers": workers, "ray": ray}
        of_rounds[asked.what](asked.rounds)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
