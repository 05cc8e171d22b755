"""`vitline data`: prepare, list, show, verify and compare corpora."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vitline.flows.cli.command_line import Json, Mfu, Recipe, Root, settings, show_rows
from vitline.flows.cli.form_options import REQUIRED, form_command
from vitline.flows.forms.forms import PrepareRequest, PretrainRequest
from vitline.vit.cost.estimate import GPU, MFU

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Corpus = Annotated[str, typer.Argument(help="NAME, NAME/VERSION or URI")]
Corpora = Annotated[
    list[str],
    typer.Argument(
        help="NAME, NAME/VERSION or URI; several for a mixture, with sampling weights: birds=3 city=1",
        metavar="NAME...",
    ),
]
_WITHOUT = PretrainRequest.model_fields.keys() - {"class_map", "overrides"}
"""What decides how a training reads its corpus are the class map, the recipe and overrides."""
_SUFFIXES = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def number_of(text: str) -> int:
    """30M -> 30,000,000; k, M and G stand for thousand, million and billion. Raises ValueError."""
    digits, factor = (text[:-1], text[-1:].lower()) if text[-1:].isalpha() else (text, "")
    try:
        number = float(digits.replace(",", "").replace("_", "")) * _SUFFIXES[factor]
        if number < 1 or number != int(number):
            raise ValueError
        return int(number)
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is not a number of rows; write it as 1000, 50k, 30M or 1.5G.") from None


@form_command(app, "prepare", PrepareRequest, without=("preset",), defaults={"source": REQUIRED})
def data_prepare(
    fields: dict[str, Any],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Examine a sample and report what to expect; write nothing to the store.")
    ] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Prepare a corpus of verified Parquet shards from labelled images. The same request resumes where it stopped.

    Example: `vitline data prepare --source ~/pictures/birds --name birds --set recipe.val_per_class=50`
    """
    from vitline.flows.cli.inspect_corpus import prepare_and_show, show_dry_run
    from vitline.flows.runs.prepare_corpus import source_request

    chosen = settings(root)
    request = source_request(chosen.root, **{"name": None, **fields})
    (show_dry_run if dry_run else prepare_and_show)(chosen, request, as_json=json)


@app.command("ls")
def data_ls(root: Root = None, json: Json = False) -> None:
    """List the corpora and their subsets. Example: `vitline data ls --json`"""
    from vitline.flows.catalog.lists import list_corpora

    where = settings(root).root
    columns = ["name", "version", "images", "refused", "classes", "splits", "made_of", "digest"]
    empty = f"No corpus below {where} yet; `vitline data prepare --source DIR --name NAME` prepares one."
    unreadable = list[Exception]()
    rows = list_corpora(where, unreadable.append)
    show_rows("corpora", rows, columns, json, empty, unreadable)


@app.command("show")
def data_show(name: Corpus, root: Root = None, json: Json = False) -> None:
    """Show the manifest and the statistics of a corpus: splits, classes, formats, refused images, duplicates, leakage.

    Example: `vitline data show birds`
    """
    from vitline.flows.cli.inspect_corpus import show_corpus

    show_corpus(settings(root), name, as_json=json)


@app.command("diff")
def data_diff(
    a: Corpus,
    b: Annotated[str, typer.Argument(help="NAME, NAME/VERSION or URI of the other corpus")],
    root: Root = None,
    json: Json = False,
) -> None:
    """Compare two corpora: requests, classes, counts and examples.

    Example: `vitline data diff birds/0a1b2c3d4e5f birds/9f8e7d6c5b4a`
    """
    from vitline.flows.cli.inspect_corpus import show_diff

    show_diff(settings(root), a, b, as_json=json)


@app.command("subset")
def data_subset(
    name: Corpus,
    number: Annotated[str, typer.Argument(help="Rows: 1000, 50k, 30M")],
    split: Annotated[
        str,
        typer.Option(
            help="Split to shorten. Other splits are kept; those that include it, such as trainval, are dropped."
        ),
    ] = "train",
    root: Root = None,
    json: Json = False,
) -> None:
    """Make a subset of the first rows of a split, without copying. Rows are shuffled within a segment and segments keep their order, so
    a larger subset contains a smaller one.

    Example: `vitline data subset birds 30M`
    """
    from vitline.flows.cli.inspect_corpus import take_and_show

    take_and_show(settings(root), name, number_of(number), split, as_json=json)


@app.command("verify")
def data_verify(
    name: Corpus,
    pixels: Annotated[
        bool,
        typer.Option(
            "--pixels",
            help="Also decode every image, verify PNG checksums and list the corrupt images. Takes about as long as preparing them.",
        ),
    ] = False,
    root: Root = None,
    json: Json = False,
) -> None:
    """Read a corpus back and list every file that differs from what was written. Example: `vitline data verify birds --pixels`"""
    from vitline.flows.cli.inspect_corpus import verify_and_show

    verify_and_show(settings(root), name, pixels=pixels, as_json=json)


@form_command(app, "preview", PretrainRequest, without=_WITHOUT)
def data_preview(
    fields: dict[str, Any],
    names: Corpora,
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("preview.html"),
    examples: Annotated[int, typer.Option(min=1, max=100, help="Number of examples.")] = 6,
    views: Annotated[int, typer.Option(min=1, max=20, help="Augmented views per example.")] = 3,
    mixed: Annotated[int, typer.Option(min=0, max=100, help="Number of MixUp and CutMix pairs.")] = 6,
    root: Root = None,
    json: Json = False,
) -> None:
    """Write an HTML page of the images as a training sees them: originals, evaluation views, augmented views with their parameters, and
    mixed pairs with their weights.

    Example: `vitline data preview birds --recipe icons --set recipe.input.augment.mixup_alpha=0.2`
    """
    from vitline.flows.cli.training import requested_training
    from vitline.flows.cli.training_input import write_views

    training = requested_training(settings(root).root, names, recipe, fields)
    write_views(training, recipe, out, examples=examples, views=views, mixed=mixed, as_json=json)


@form_command(app, "bench", PretrainRequest, without=_WITHOUT)
def data_bench(
    fields: dict[str, Any],
    names: Corpora,
    recipe: Recipe,
    gpu: Annotated[str, typer.Option(help="The GPU to feed: `H200`, `A100`, ...")] = GPU,
    mfu: Mfu = MFU,
    images_per_s: Annotated[
        float | None,
        typer.Option(
            "--images-per-s",
            help="Images per second that one GPU consumes, if known from `throughput/images_per_s` of a run; replaces --gpu and --mfu.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Workers (GPUs) per node, measured concurrently in separate processes.")
    ] = 1,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds to measure reading alone, then again to measure the whole pipeline.")
    ] = 10.0,
    root: Root = None,
    json: Json = False,
) -> None:
    """Measure how many images per second this machine loads for a training, against what a GPU consumes; show where the time goes and
    what to change. Measures a first epoch: decoded images are not cached.

    Example: `vitline data bench birds --recipe vit-b16-i21k --gpu H200 --workers 8`
    """
    from vitline.flows.cli.training import requested_training
    from vitline.flows.cli.training_input import show_bench

    training = requested_training(settings(root).root, names, recipe, fields)
    show_bench(training, gpu=gpu, mfu=mfu, images_per_s=images_per_s, workers=workers, seconds=seconds, as_json=json)
