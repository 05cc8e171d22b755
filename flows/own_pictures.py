"""`vitline run`: a folder of somebody's pictures to a pre-trained network and its score, in one command."""

import os
from pathlib import Path

import typer

from flows import console
from flows.engines import engines
from flows.prepare_corpus import prepare_corpora, refusals, source_request
from flows.pretrain import pretrain
from flows.training import plan_training
from infra.settings import Settings
from vit.config import TrainConfig
from vit.recipes.own_pictures import own_pictures

# Decoding, cropping and waiting beside the arithmetic, measured on 2 cores with small images.
INPUT_SHARE = 0.25
START_S = 25.0


def run_own_pictures(
    settings: Settings, source: Path, name: str, *, steps: int | None, confirm: bool, as_json: bool
) -> None:
    """Prepares `source`, says what training will take, trains, and prints the score on the held-out pictures."""
    with engines(settings) as at_hand:
        (corpus,), _, _ = prepare_corpora([source_request(settings.root, str(source), name)], at_hand)
        counts = corpus.manifest.counts
        console.say(
            f"{name}: {counts.num_accepted:,} pictures in {corpus.manifest.num_classes:,} classes, {counts.num_refused:,} refused"
        )
        for line in refusals(corpus, limit=10):
            console.say(f"  {line}")
        workers = max(1, min(os.cpu_count() or 1, 8))
        config = own_pictures(name, corpus.uri, corpus.manifest, num_workers=workers, total_steps=steps)
        plan = plan_training(config)
        seconds = estimate(config, corpus.manifest.num_classes)
        console.say(
            f"recipe: {config.recipe.model.summary}; {plan['steps']:,} steps = {plan['epochs']:.0f} passes; "
            f"estimated {console.duration(seconds)} here with {config.execution.num_workers} workers"
        )
        if confirm and not as_json and console.ERR.is_terminal and not typer.confirm("Start?", default=True, err=True):
            raise typer.Exit(0)
        spec, result = pretrain(config, at_hand)
    if as_json:
        console.emit({"run": spec.run_key, "reused": result.reused, "estimated_s": seconds, **result.state})
        return
    state = result.state
    rows = [["run", spec.run_key], ["time", "reused" if result.reused else console.duration(result.wall_s)]]
    if "val_top1" in state:
        rows.append(
            ["top-1 on held-out pictures", f"{console.percent(state['val_top1'])} of {state['val_examples']:,}"]
        )
        rows.append(["always the most frequent class", console.percent(state["val_majority_fraction"])])
    rows += [["model", state["model"]], ["use it", "from vit.published import load_model"]]
    console.table(name, ["", ""], rows)


def estimate(config: TrainConfig, num_classes: int) -> float:
    """Seconds of the whole training on this machine, from a few real updates; start-up and decoding included."""
    from vit.estimate import seconds_per_step

    per_step = seconds_per_step(config.recipe, config.execution, num_classes)
    return START_S + config.recipe.total_steps * per_step * (1 + INPUT_SHARE)
