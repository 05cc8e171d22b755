"""What a training sees of its corpus (`vitline data preview`), and how fast (`vitline data bench`): what the loader feeds to a node from
its store, beside what the GPUs of the node eat, and what to change."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitline.flows import console
from vitline.flows.cli.command_line import check_page
from vitline.flows.cli.tables import show_table
from vitline.flows.plans.training_cost import reading_plan
from vitline.infra.html.text import num_bytes
from vitline.vit.config import TrainConfig
from vitline.vit.corpora.training_sources import sources_of
from vitline.vit.cost.decoder_speed import DecoderSpeed, decoder_speed
from vitline.vit.cost.estimate import Demand, PlanGpus, demand_of
from vitline.vit.cost.input_speed import node_speed
from vitline.vit.cost.input_verdict import STAGES, InputVerdict, Setting
from vitline.vit.input.decoding.how_many import decode_processes
from vitline.vit.input.load_queue import max_concurrent_loads
from vitline.vit.pages.views import collect_views, views_html
from vitline.vit.run.resolved import ResolvedTraining


def write_views(
    training: ResolvedTraining, recipe_name: str, out: Path, *, examples: int, views: int, mixed: int, as_json: bool
) -> None:
    """Writes the page and prints where it is. Raises ValueError if the folder of `out` does not exist."""
    check_page("--out", out)
    config, corpora = training.config, training.corpora
    names = " and ".join(part.title for part in corpora.parts)
    versions = " and ".join(f"{part.manifest.name}/{part.manifest.version}" for part in corpora.parts)
    with console.progress(f"drawing views of {names}"):
        found = collect_views(corpora, config.split, config.recipe, examples=examples, views=views, mixed=mixed)
        lead = (
            f"Corpus {versions}, split {config.split}; recipe {recipe_name}, "
            f"seed {config.recipe.seed}, batches of {config.recipe.input.global_batch_size:,}."
        )
        page = views_html(found, config.recipe, title=f"Training views of {names}", lead=lead)
        out.write_text(page, encoding="utf-8")
    if as_json:
        console.emit({"page": str(out), "examples": len(found.examples), "mixed": len(found.mixed)})
    else:
        console.print_result(f"wrote {out}")


def show_bench(
    training: ResolvedTraining,
    *,
    gpu: str,
    mfu: float,
    images_per_s: float | None,
    workers: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Measures and prints. Raises ValueError before anything is measured for what does not fit together."""
    config, corpora, split = training.config, training.corpora, training.config.split
    needed = demand_of(config.recipe, corpora.num_classes, PlanGpus(gpu, mfu), images_per_s)
    if not 1 <= workers <= config.execution.num_workers:
        raise ValueError(
            f"--workers {workers} of a node must be 1 to execution.num_workers={config.execution.num_workers}, the workers of the whole "
            "training. Give fewer, or add --set execution.num_workers=N."
        )
    plan, sizes = reading_plan(config, corpora), [part.manifest.mean_row_group_bytes(split) for part in corpora.parts]
    orders = [part.order(split, config.recipe.input, config.recipe.seed) for part in corpora.parts]
    groups_per_row = sum(
        share * order.groups.num_groups / order.num_rows for share, order in zip(corpora.shares, orders, strict=True)
    )
    high_latency = any(part.store.high_latency for part in corpora.parts)
    lanes = config.recipe.input.num_lanes // config.execution.num_workers
    setting = Setting(
        cores=len(os.sched_getaffinity(0)),
        threads=config.execution.decode_threads,
        processes=decode_processes(
            config.execution.decode_processes, threads=config.execution.decode_threads, lanes=lanes
        ),
        lanes=lanes,
        loads_at_a_time=max_concurrent_loads(high_latency),
        rows_per_group=max(1, round(1 / groups_per_row)),
        read_ahead_bytes=config.execution.read_ahead_bytes,
        open_bytes=plan["open_memory_bytes"],
        split_bytes=sum(size * order.groups.num_groups for size, order in zip(sizes, orders, strict=True)),
        can_cache=high_latency and config.execution.shard_cache_dir is None,
    )
    name = " and ".join(f"{part.manifest.name}/{part.manifest.version}" for part in corpora.parts)
    with console.progress(f"reading and decoding {name} for {2 * seconds:.0f} s, {_workers(workers)} at once"):
        verdict = InputVerdict(node_speed(config, workers, seconds), setting, needed.images_per_s)
        decoders = decoder_speed(sources_of(corpora, split), config, seconds / 2)
    if as_json:
        console.emit(_as_json(name, config, needed, verdict, decoders))
        return
    what = (
        f"{config.recipe.model.summary}, {needed.gpu} at {needed.mfu:.0%} of its peak"
        if needed.mfu
        else config.recipe.model.summary
    )
    title = f"{name}, {split}, at {' and '.join(part.store.uri for part in corpora.parts)}: {what}"
    show_table(title, ["stage", "images/s", "of the need", "measured"], _rows(verdict, needed))
    for line in [*_lines(verdict), decoders.sentence()]:
        console.print_result(line)


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _rows(verdict: InputVerdict, needed: Demand) -> list[list[str]]:
    setting, first = verdict.setting, verdict.speeds[0]
    read, alone = first.read, verdict.alone()
    group_bytes = read.bytes_per_image * setting.rows_per_group
    measured = {
        "store": f"answers after {_ms(read.answer_s)}; {setting.loads_at_a_time} row groups at a time in each worker",
        "network": f"{num_bytes(alone['network'] * read.bytes_per_image)}/s; a row group of {num_bytes(group_bytes)} alone takes "
        f"{_ms(read.load_s)}",
        "decode": f"{_ms(first.decode_cpu_s_per_image)} of CPU an image, threads a worker: {setting.threads} in "
        f"{setting.processes or 'no'} input processes, cores: {setting.cores}",
        "hand-over": f"{_ms(first.hand_over_cpu_s_per_image)} of CPU an image in the thread that plans",
    }
    node = needed.images_per_s * verdict.workers

    def row(name: str, rate: float, text: str) -> list[str]:
        return [name, f"{rate:,.0f}", f"{rate / node:.2f} x", text]

    return [
        *(row(f"{stage} alone", alone[stage], measured[stage]) for stage in STAGES),
        row(
            "the whole way",
            verdict.images_per_s,
            f"{verdict.images_per_core_s:,.0f} images/s a core; first batch after {first.first_batch_s:.1f} s",
        ),
        [
            f"needed by {_gpus_of(verdict)}",
            f"{node:,.0f}",
            "",
            f"{needed.origin}; {num_bytes(verdict.bytes_per_s)}/s of the store",
        ],
    ]


def _gpus_of(verdict: InputVerdict) -> str:
    return "1 GPU" if verdict.workers == 1 else f"{verdict.workers} GPUs"


def _lines(verdict: InputVerdict) -> list[str]:
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in verdict.shares().items())
    changes = [f"  {change}" for change in verdict.changes()]
    return [
        verdict.sentence(),
        f"Where the time goes, if batches are taken at once: {shares}.",
        *(["To change:", *changes] if changes else []),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _as_json(
    name: str, config: TrainConfig, needed: Demand, verdict: InputVerdict, decoders: DecoderSpeed
) -> dict[str, Any]:
    return {
        "corpus": name,
        "split": config.split,
        "needed_by_gpu": asdict(needed),
        "needed_bytes_per_s": verdict.bytes_per_s,
        "workers": [
            {"rank": rank, **asdict(speed), "waits": speed.waits._asdict()} for rank, speed in enumerate(verdict.speeds)
        ],
        "setting": asdict(verdict.setting),
        "images_per_s": verdict.images_per_s,
        "images_per_core_s": verdict.images_per_core_s,
        "alone_images_per_s": verdict.alone(),
        "shares_of_waits": verdict.shares(),
        "fraction_of_need": verdict.fraction,
        "keeps_up": verdict.fraction >= 1,
        "limit": verdict.limit,
        "cores_needed": verdict.cores_needed,
        "loads_needed": verdict.loads_needed,
        "decoders": {"used": "whole" if decoders.native is None else "native", **asdict(decoders)},
        "verdict": verdict.sentence(),
        "changes": list(verdict.changes()),
    }
