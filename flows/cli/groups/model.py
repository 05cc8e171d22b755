"""`vitline model`: published models, and weights of other codebases."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings, show_one, show_rows
from vitline.flows.cli.form_options import form_command
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.forms import PredictRequest

if TYPE_CHECKING:
    from vitline.vit.convert.weights import Weights

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Model = Annotated[
    str,
    typer.Argument(
        help="NAME (its newest version), NAME/VERSION, NAME@ALIAS or URI of a published model; a .npz file; a folder of timm or "
        "Hugging Face"
    ),
]
Variant = Annotated[
    str | None, typer.Option(help="Expected variant, such as `b16` or `r50_b16`; another one is an error.")
]
Classes = Annotated[
    Path | None, typer.Option(help="File of class names in the order of the head: a JSON list, or one name per line.")
]
ImageSize = Annotated[
    int | None, typer.Option("--image-size", min=1, help="Side of the images in px; position embeddings are resampled.")
]
Target = Literal["vitline", "timm", "huggingface", "onnx", "torch-export", "mlflow"]
Mode = Literal["forward", "training", "both"]


@app.command("ls")
def model_ls(root: Root = None, json: Json = False) -> None:
    """List the published models. Example: `vitline model ls`"""
    from vitline.flows.catalog.lists import list_models

    where = settings(root).root
    columns = ["name", "version", "classes", "image_size_px", "run", "created_at", "digest"]
    empty = f"No model below {where} yet; a finished `vitline pretrain run` publishes one."
    unreadable = list[Exception]()
    rows = list_models(where, unreadable.append)
    show_rows("models", rows, columns, json, empty, unreadable)


@app.command("variants")
def model_variants(json: Json = False) -> None:
    """List the named networks with their parameters and FLOPs. Example: `vitline model variants`"""
    from vitline.vit.models.variant_sizes import SIZES
    from vitline.vit.models.variants import REGISTERED, network_variant

    rows = [{"variant": name, **size_fields(network_variant(name), *SIZES[name])} for name in REGISTERED]
    columns = ["variant", "network", "parameters", "forward_gflop_per_image"]
    show_rows("variants", rows, columns, json, "")


@app.command("show")
def model_show(
    name: Annotated[str, typer.Argument(help="NAME, NAME/VERSION or URI of a model, or a variant such as `b16`")],
    root: Root = None,
    num_classes: Annotated[
        int | None, typer.Option(min=1, help="For a variant: classes of the head. Default: 1000.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="For a variant: side of the images in px. Default: 224.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor with its shape.")] = False,
    json: Json = False,
) -> None:
    """Show shape, parameters, FLOPs and memory; for a published model also its image contract and provenance.

    Example: `vitline model show b16 --image-size 384`
    """
    from vitline.flows.catalog.lists import find_model, list_models
    from vitline.vit.models.config import network_config
    from vitline.vit.models.variants import is_variant, network_variant

    where = settings(root).root
    published = "@" in name or any(
        name in (row["name"], f"{row['name']}/{row['version']}") for row in list_models(where)
    )
    if is_variant(name) and not published:
        config, classes = network_variant(name, image_size_px=image_size or 224), num_classes or 1000
        shown: dict[str, Any] = {"variant": name, **sizes(config, classes), "model": config.model_dump(mode="json")}
    else:
        if num_classes or image_size:
            raise ValueError(
                f"{name} is not a variant: --num-classes and --image-size do not apply to a published model. Omit them."
            )
        shown = describe_model(find_model(where, name))
        config, classes = network_config(shown["model"]), shown["classes"]
    if tensors:
        from vitline.vit.models.build import meta_network

        network = meta_network(config, classes)
        shown["tensors"] = {key.replace(".", "/"): list(value.shape) for key, value in network.state_dict().items()}
    show_one(shown, json)


@app.command("convert")
def model_convert(
    source: Model,
    out: Annotated[str, typer.Argument(help="Folder or file to write; with `--to vitline` the name of the model")],
    to: Annotated[Target, typer.Option(help="Format to write.")] = "vitline",
    variant: Variant = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Convert weights between formats and report every tensor; an unknown tensor is an error.

    Example: `vitline model convert B_16.npz paper-b16 --variant b16 --classes imagenet21k.txt`
    """
    from vitline.flows.cli.models import convert_to

    where = settings(root).root
    weights = opened(source, root, variant, classes, image_size)
    written = convert_to(weights.model, to, out, where)
    shown: dict[str, Any] = {"written": written, "to": to, "network": weights.model.network.config.summary}
    report = weights.report.as_json()
    shown["report"] = report if json else {**report, "loaded": f"{len(report['loaded'])} parameters"}
    show_one(shown, json)


@app.command("predict")
def model_predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files")],
    top: Annotated[int, typer.Option(min=1, help="Number of classes to show for each image.")] = 5,
    classes: Classes = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Predict class probabilities for image files, preprocessed as the model expects.

    Example: `vitline model predict birds robin.jpg`
    """
    from vitline.flows.cli.models import predict_files

    rows = predict_files(opened(model, root, None, classes, None).model, images, top)
    show_rows("predictions", rows, ["image", "class", "probability"], json, "")
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


@form_command(app, "predict-corpus", PredictRequest, arguments=("model", "corpus"), spelled={"splits": "split"})
def model_predict_corpus(fields: dict[str, Any], root: Root = None, json: Json = False) -> None:
    """Predict the classes of all images of a corpus, and store them as Parquet files. Resumes what was interrupted.

    Example: `vitline model predict-corpus icons new-icons --top-k 3`
    """
    from vitline.flows.forms.evaluation_plan import resolve_predict
    from vitline.flows.runs.predict_classes import folder_of, predict_classes, prediction_rows
    from vitline.flows.runs.services import open_services

    where = settings(root)
    spec = resolve_predict(where.root, PredictRequest.model_validate(fields))
    with open_services(where) as services:
        result = predict_classes(spec, services)
    if json:
        counts = result.state["predicted"]
        console.emit({"run": spec.run_key, "reused": result.reused, "files": folder_of(spec), **counts})
        return
    show_table(spec.run_key, ["", " "], prediction_rows(spec, result))


@app.command("verify")
def model_verify(
    name: Annotated[str, typer.Argument(help="NAME, NAME/VERSION or URI")], root: Root = None, json: Json = False
) -> None:
    """Read a published model back, check every tensor against its digest, and recompute its stored test output.

    Example: `vitline model verify birds`
    """
    from vitline.flows.catalog.lists import find_model
    from vitline.vit.published.models import verify_model

    show_one(verify_model(find_model(settings(root).root, name)), json)


@app.command("promote")
def model_promote(
    pipeline: Annotated[
        str,
        typer.Argument(help="Key of a finished pipeline, or its first characters; with --to, the name of a series."),
    ],
    reason: Annotated[str, typer.Option(help="Why this model becomes the champion, in one sentence.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="An earlier model: `before` for the previous champion, or a night, as 2026-11-23T02:00 (UTC) or the date alone."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Make the model of a pipeline the champion, which later nights of the same name are compared with. In MLflow's registry it gets
    the alias `champion`.

    Example: `vitline model promote nightly-0a1b2c3d4e5f --reason "two points better on all tasks"`

    Example: `vitline model promote nightly --to before --reason "it fails on night pictures"`
    """
    from vitline.flows.nights.promote import pipeline_to, promote
    from vitline.flows.to_mlflow import outbox
    from vitline.flows.to_mlflow.child import sync_runs
    from vitline.infra.settings import user_at_host
    from vitline.infra.storage import open_store

    chosen = settings(root)
    store, by = open_store(chosen.root), user_at_host()
    champion = promote(store, pipeline_to(store, pipeline, to) if to else pipeline, why=reason, by=by)
    outbox.put(store, outbox.OutboxEntry("pipeline", champion.pipeline))
    show_one(champion.model_dump(mode="json"), json)
    if chosen.mlflow_tracking_uri:
        for reason in sync_runs(chosen, [champion.pipeline]).left.values():
            console.say(
                f"MLflow does not have the alias yet: {reason}. `vitline ops reconcile` sends it once MLflow answers."
            )


@app.command("inspect")
def model_inspect(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder for the figures and their page")],
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", help="Image file or folder for which attention is shown. Repeatable."),
    ] = None,
    variant: Variant = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Write the paper's four figures: patch filters, position similarity, attention distance, attention rollout.

    Example: `vitline model inspect birds figures --images pictures/`
    """
    from vitline.flows.cli.models import inspect_files

    weights = opened(model, root, variant, None, None)
    written = inspect_files(weights.model, images or [], out, title=model)
    show_one({"page": str(out / "index.html"), "files": written}, json)


@app.command("bench")
def model_bench(
    variants: Annotated[
        list[str] | None, typer.Argument(help="Variants. Default: those of the paper, on a CPU the small ones")
    ] = None,
    image_size: Annotated[
        list[int] | None,
        typer.Option("--image-size", min=1, help="Side of the images in px. Repeatable. Default: 224."),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="`forward`, `training` (whole updates), or both.")] = "both",
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Arithmetic.")] = "bfloat16",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size. Default: chosen to fit the memory.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps.")] = 5,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile, which is faster on GPUs.")] = False,
    json: Json = False,
) -> None:
    """Measure images per second, largest batch and MFU by variant and resolution on this device (the paper's Figure 12).

    Example: `vitline model bench s16 b16 --image-size 224 --image-size 384`
    """
    from vitline.flows.cli.models import bench_rows

    modes = ("forward", "training") if mode == "both" else (mode,)
    rows, peak = bench_rows(variants, image_size or [224], modes, precision, batch_size, steps, compiled)
    columns = ["variant", "image_size_px", "mode", "batch_size", "images_per_s", "mfu", "largest_batch"]
    console.say(peak)
    show_rows("speeds", [vars(row) for row in rows], columns, json, "")


def sizes(config: Any, num_classes: int) -> dict[str, Any]:
    """Parameters, operations and bytes of a network."""
    from vitline.vit.models.build import meta_network
    from vitline.vit.models.flops import forward_flops

    count = sum(p.numel() for p in meta_network(config, num_classes).parameters())
    return size_fields(config, count, forward_flops(config, num_classes))


def describe_model(uri: str) -> dict[str, Any]:
    """Facts about a published model: sizes, FLOPs, image contract, provenance."""
    from vitline.infra.storage import open_store
    from vitline.vit.models.flops import forward_flops
    from vitline.vit.published.model_record import network_of, published_record, read_contract

    store = open_store(uri)
    config = published_record(store)
    network, classes = network_of(store, config), config["num_classes"]
    weights_bytes = sum(piece["end"] - piece["start"] for piece in config["tensors"])
    return {
        "uri": store.uri,
        "digest": config["digest"],
        "model": config["model"],
        "classes": classes,
        "weights_bytes": weights_bytes,
        **size_fields(network, weights_bytes // 4, forward_flops(network, classes)),
        "image_contract": read_contract(store, config),
        "provenance": config["provenance"],
    }


def size_fields(config: Any, parameters: int, forward_flops: int) -> dict[str, Any]:
    return {
        "network": config.summary,
        "parameters": parameters,
        "forward_gflop_per_image": forward_flops / 1e9,
        "memory_bytes": memory_bytes(parameters),
    }


def memory_bytes(parameters: int) -> dict[str, int]:
    """Bytes of the weights, and of weights, gradients and Adam's two moments together."""
    return {
        "weights_float32": 4 * parameters,
        "weights_bfloat16": 2 * parameters,
        "training_with_adam": 16 * parameters,
    }


def opened(
    source: str, root: str | None, variant: str | None, classes: Path | None, image_size: int | None
) -> "Weights":
    """The weights of a model below the root, or of a file or folder."""
    from vitline.flows.cli.models import open_weights

    names = None if classes is None else read_names(classes)
    return open_weights(settings(root).root, source, variant=variant, classes=names, image_size_px=image_size)


def read_names(path: Path) -> tuple[str, ...]:
    """Class names from a JSON list or lines of text. Raises ValueError if there are none."""
    from vitline.infra.storage import read_small

    text = read_small(str(path), 64 * 1024 * 1024).decode()
    names = (
        jsonlib.loads(text) if text.lstrip().startswith("[") else [line for line in text.splitlines() if line.strip()]
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} holds no class names; a JSON list of strings, or one name per line, was expected.")
    return tuple(names)
