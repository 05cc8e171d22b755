"""`vitline train-folder`: prepares a folder of pictures, pre-trains a network on it and scores it, in one command."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import typer

from vitline.data_prep.shard_format import ShardReader
from vitline.flows import console
from vitline.flows.cli.tables import show_table
from vitline.flows.plans.held_out import held_out, score_text
from vitline.flows.runs.prepare_corpus import PreparedCorpus, prepare_corpora, refusals, source_request
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import open_services
from vitline.infra.html.text import clock, percent
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.config import TrainConfig
from vitline.vit.recipes.own_images import own_images
from vitline.vit.run.devices import devices_text
from vitline.vit.run.resolved import resolve

# Time of decoding, cropping and waiting as a fraction of the arithmetic, measured on 2 cores with small images.
INPUT_SHARE = 0.25
START_S = 25.0


def train_folder(
    settings: Settings, source: Path, name: str, *, steps: int | None, confirm: bool, as_json: bool
) -> None:
    """Prepares `source`, estimates the time of the training, trains, and prints the score on held-out pictures."""
    with open_services(settings) as services:
        (corpus,), _, _ = prepare_corpora([source_request(settings.root, str(source), name)], services)
        counts = corpus.manifest.counts
        console.say(
            f"{name}: {counts.num_accepted:,} pictures in {corpus.manifest.num_classes:,} classes, {counts.num_refused:,} refused"
        )
        for line in refusals(corpus, limit=10):
            console.say(f"  {line}")
        gpus, cpus = (gpus_here() if trains_here(settings) else None), os.cpu_count() or 1
        config = own_images(
            name, corpus.uri, corpus.manifest, num_workers=min(cpus, 8), total_steps=steps, num_gpus=gpus, num_cpus=cpus
        )
        opened = {corpus.uri: (open_store(corpus.uri), corpus.manifest)}
        training = resolve(config, settings.root, opened)
        if not (scored_on := held_out(config, training.corpora)).is_telling:
            console.say(f"warning: {name}: {scored_on.text}")
        seconds = estimate(config, corpus.manifest.num_classes)
        console.say(
            f"recipe: {config.recipe.model.summary}; estimated {clock(seconds)} here on "
            f"{devices_text('cuda' if gpus else 'cpu', config.execution.num_workers)}, {config.recipe.precision}"
        )
        if (
            confirm
            and not as_json
            and console.err().is_terminal
            and not typer.confirm("Start?", default=True, err=True)
        ):
            raise typer.Exit(0)
        spec, result = train_model(training, services)
    if as_json:
        console.emit({"run": spec.run_key, "reused": result.reused, "estimated_s": seconds, **result.state})
        return
    state = result.state
    rows = [["run", spec.run_key], ["time", "reused" if result.reused else clock(result.wall_s)]]
    rows.append(["top-1 on held-out pictures", score_text(state, labelled=config.recipe.masked_patches is None)])
    if "val_top1" in state:
        rows.append(["held-out pictures", f"{state['val_examples']:,}"])
        rows.append(["majority class", percent(state["val_majority_fraction"])])
    rows.append(["model", state["model"]])
    show_table(name, ["", ""], rows)
    console.print_result(
        f"To use it, in Python in this folder:\n\n{example_of_use(state['model'], corpus, source, settings)}"
    )


def example_of_use(model: str, corpus: PreparedCorpus, source: Path, settings: Settings) -> str:
    """Lines of Python, ready to paste, that load the model and predict the first held-out picture."""
    # The name is enough if Python finds the same root by itself, which it does not if the root was given as an option.
    name = "/".join(model.split("/")[-2:]) if settings.root == Settings().root else model
    picture = str(first_picture(corpus, source) or "picture.jpg")
    return f"from vitline import load_model\n\nmodel = load_model({name!r})\nprint(model.predict([{picture!r}]))\n"


def first_picture(corpus: PreparedCorpus, source: Path) -> Path | None:
    """A file of the source that is in the corpus, preferably in val; None if the images are in archives."""
    manifest = corpus.manifest
    split = "val" if "val" in manifest.splits else "train"
    with ShardReader(open_store(corpus.uri), manifest, split) as reader:
        example_id = reader.row_group(0, ["example_id"]).column("example_id")[0].as_py()
    path = (source / example_id).absolute()
    return path if path.is_file() else None


def trains_here(settings: Settings) -> bool:
    """Whether Ray runs on this machine, started for this command or by the local stack."""
    return settings.ray_address is None or urlsplit(settings.ray_address).hostname in ("127.0.0.1", "localhost", "::1")


def gpus_here() -> int:
    """The GPUs of this machine that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def estimate(config: TrainConfig, num_classes: int) -> float:
    """Estimated seconds of the training on this machine, from a few timed updates; includes start-up and decoding."""
    from vitline.vit.cost.step_time import seconds_per_step

    per_step = seconds_per_step(config.recipe, config.execution, num_classes)
    return START_S + config.recipe.total_steps * per_step * (1 + INPUT_SHARE)
