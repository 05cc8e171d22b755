"""`make demo`: the main job on real images, on one machine, with a table and a page at the end."""

import shutil
import time
from dataclasses import replace
from typing import Literal

from data_prep.corpora import presets
from data_prep.corpora.npm_package import FetchUnavailable
from flows import console
from flows.catalog import list_corpora
from flows.end_to_end import PipelineConfig, PipelineResult, pretrain_then_transfer, with_seed
from flows.report import SCORE_COLUMNS, score_rows, standard_error
from flows.stage import Cluster
from infra.config import replace as replace_config
from infra.local.paths import log_dir
from infra.settings import Settings
from vit.recipes import emoji
from vit.vtab.report import coverage

Profile = Literal["full", "smoke"]
# Seconds on 2 cores after installation; stated in the README.
BUDGETS_S = (45.0, 180.0, 180.0)


def emoji_pipeline() -> PipelineConfig:
    """Pre-train on Noto emoji, transfer to Twitter emoji and to handwritten digits."""
    return PipelineConfig(
        name="emoji",
        pretrain_corpus=presets.noto_emoji(),
        task_corpora=(presets.twitter_emoji(), presets.digits()),
        recipe=emoji.pretrain(),
        execution=emoji.execution(),
        protocol=emoji.protocol(),
        budgets_s=BUDGETS_S,
    )


def digits_pipeline() -> PipelineConfig:
    """Where npm is not to be had: pre-train on the digits 0-4, transfer to 5-9."""
    base = emoji_pipeline()
    return replace(
        base,
        name="digits",
        pretrain_corpus=presets.digits_0_to_4(),
        task_corpora=(presets.digits_5_to_9(),),
        recipe=replace_config(base.recipe, **{"input.augment.flip": False, "total_steps": 300}),
        protocol=replace_config(base.protocol, **{"augment.flip": False}),
    )


def smoke(config: PipelineConfig) -> PipelineConfig:
    """The same pipeline with other numbers: a few steps, to see that everything works."""
    return replace(
        config,
        name=f"{config.name}-smoke",
        recipe=replace_config(config.recipe, **{"total_steps": 20, "optim.warmup_steps": 2}),
        execution=replace_config(config.execution, save_every_steps=10, log_every_steps=5),
        protocol=replace_config(config.protocol, **{"name": "smoke", "total_steps": 5, "warmup_steps": 1}),
        budgets_s=(None, None, None),
    )


def run_demo(settings: Settings, *, profile: Profile, seed: int, as_json: bool) -> PipelineResult:
    """Runs the demo and prints its result; without npm it takes the digits and says so."""
    started = time.monotonic()
    preamble(settings, profile)
    note = ""
    with Cluster(settings, log_dir(settings), console.say) as cluster:
        try:
            result = pretrain_then_transfer(sized(emoji_pipeline(), profile, seed), settings.root, cluster)
        except FetchUnavailable as error:
            note = (
                f"The emoji could not be fetched ({error}). The digits that come with scikit-learn stand in for them."
            )
            console.say(note)
            result = pretrain_then_transfer(sized(digits_pipeline(), profile, seed), settings.root, cluster)
    if as_json:
        console.emit(as_dict(result))
    else:
        show(result, note, time.monotonic() - started)
    return result


def sized(config: PipelineConfig, profile: Profile, seed: int) -> PipelineConfig:
    """The pipeline with the numbers that were asked for."""
    seeded = with_seed(config, seed)
    return smoke(seeded) if profile == "smoke" else seeded


def preamble(settings: Settings, profile: Profile) -> None:
    """What will be downloaded, kept and needed, before anything happens."""
    npm = (
        "136 MB of emoji by npm, kept by checksum"
        if shutil.which("npm")
        else "nothing (npm is absent: digits instead of emoji)"
    )
    minutes = "about 5 minutes on 2 cores" if profile == "full" else "about 2 minutes"
    console.say(f"vitline demo: downloads {npm}; 0.1 GB of disk at {settings.root}; 3 GB of memory; {minutes}.")
    console.say("Finished stages are reused: run it again, or after Ctrl-C, and it goes on where it was.")


def show(result: PipelineResult, note: str, wall_s: float) -> None:
    """The closing tables: stages against their budgets, scores against scratch and chance, and what to do next."""
    rows = [[s.stage, s.what, s.where, s.time()] for s in result.stages]
    console.table("Stages", ["stage", "what", "where", "time"], rows, right=(3,))
    console.table(
        "Scores: top-1 on test, read once", list(SCORE_COLUMNS), score_rows(result.scores), right=tuple(range(1, 8))
    )
    if note:
        console.tell(note)
    errors = max(standard_error(score) for score in result.scores)
    console.tell(
        f"One run: a score's standard error is up to {100 * errors:.1f} points; three seeds are in the README."
    )
    names = [row["name"] for row in list_corpora(result.root)]
    console.tell(
        f"{coverage(names)}: `vitline vtab report` shows the paper's rows; any corpus with test split is a task."
    )
    reused = [s.stage for s in result.stages if s.reused]
    if reused:
        console.tell(f"Reused from an earlier run: {', '.join(reused)}.")
    console.tell(f"Model: {result.model}")
    console.tell(f"Report: {result.report}")
    console.tell(f"Whole run: {console.duration(wall_s)}")


def as_dict(result: PipelineResult) -> dict:
    return {
        "run": result.run_key,
        "model": result.model,
        "report": result.report,
        "stages": [vars(stage) for stage in result.stages],
        "scores": [score.model_dump(mode="json") for score in result.scores],
        "corpora": {c.manifest.name: c.manifest.digest for c in result.corpora},
    }
