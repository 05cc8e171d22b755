"""The reference pages, generated from the code: commands, forms, config fields, metrics, names, environment, Python API.

`docs/hooks.py` calls `pages()` whenever MkDocs builds the site, so that a page is never older than the code.
"""

import ast
import html
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer.main
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

import data_prep.decode
import data_prep.shard_format
import infra.stores.store
import vit.published
import vit.vtab.protocols
from data_prep.config import CorpusConfig
from data_prep.corpora.presets import PRESETS
from flows.cli import app
from flows.on_prefect.deployments import DEPLOYMENTS, Deployment
from flows.reports.protocol_rows import protocol_rows
from flows.requests import forms
from flows.requests.prepare_config import SOURCES
from infra.settings import Settings
from infra.storage import open_store
from infra.system_metrics import SystemSampler
from vit.config import TrainConfig
from vit.models.config import AnyNetworkConfig, network_config
from vit.models.variants import REGISTERED, network_variant
from vit.recipes import RECIPES
from vit.vtab.protocols import Protocol
from vit.vtab.tasks import VTAB_TASKS

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")

METRICS = {
    "Training": {
        "train/loss": "Mean loss of the examples of one step.",
        "train/top1": "Fraction of the examples of one step whose highest logit is one of their labels.",
        "val/loss": "Mean loss over the held-out split, at the end of the training.",
        "val/top1": "Top-1 accuracy over the held-out split, at the end of the training.",
        "optim/lr": "Learning rate of the step.",
        "optim/grad_norm": "Global gradient norm before clipping.",
        "guard/nonfinite_steps": "Consecutive steps that were skipped because their gradient was not finite.",
        "progress/images_seen": "Training images up to this step, counting repeats.",
        "throughput/images_per_s": "Images per second over all workers; of a preparation, examined images per second.",
        "throughput/mfu": "Model FLOPs utilisation: achieved over peak FLOP/s of the device. Absent where no peak is known.",
        "time/data_wait_fraction": "Share of the time of the loop that was spent waiting for batches.",
    },
    "Preparation": {
        "data/images_accepted": "Examples in the corpus.",
        "data/images_refused": "Examples that were left out, each with a reason.",
        "data/images_duplicate": "Images that repeat another one: same file, same pixels, or near duplicates.",
        "data/images_leaked": "Training images that match an evaluation image and were not left out.",
        "data/bytes": "Bytes of the accepted images.",
        "time/prepare_s": "Seconds from the start of the preparation to its end.",
    },
    "Scores": {
        "vtab/<task>/top1": "Test score of one of VTAB's tasks.",
        "vtab/<group>/top1": "Mean over a group of VTAB (natural, specialized, structured); only if all its tasks are scored.",
        "vtab/all/top1": "Mean over all 19 tasks. With fewer tasks it is `vtab/all_<n>of19/top1`.",
        "tasks/<corpus>/top1": "Test score of any other task.",
        "fewshot/<corpus>/<n>shot/top1": "Test score of least squares on frozen features of n examples per class.",
        "linear/<corpus>/top1": "Test score of logistic regression on frozen features.",
        "knn/<corpus>/top1": "Test score of nearest neighbours on frozen features.",
        "head/<corpus>/top1": "Test score of the model's own classes.",
        "time/trials_s": "Seconds of all trials of the scores.",
    },
    "Pipelines": {
        "time/<stage>_s": "Seconds of a stage that was not reused: prepare, pretrain, evaluate.",
    },
    "Machines": {
        "system/node<k>/cpu_fraction": "Share of all CPUs in use.",
        "system/node<k>/memory_used_bytes": "Memory in use on the machine.",
        "system/node<k>/process_memory_bytes": "Resident memory of the process that trains.",
        "system/node<k>/disk_used_fraction": "Share in use of the disk with the temporary folder.",
        "system/node<k>/network_receive_bytes_per_s": "Bytes received per second, loopback excluded.",
        "system/node<k>/gpu_memory_used_bytes": "GPU memory in use by all processes; only on a GPU.",
    },
}
"""What each metric means. `differing_metrics` compares the names with those in the code."""

API: dict[str, Sequence[Any]] = {
    "Published models": (
        vit.published.load_model,
        vit.published.PublishedModel,
        vit.published.verify_model,
        vit.published.publish,
    ),
    "Corpora": (
        open_store,
        data_prep.shard_format.load_manifest,
        data_prep.shard_format.load_class_names,
        data_prep.shard_format.Manifest,
        data_prep.shard_format.ShardReader,
        data_prep.shard_format.read_row_group,
        data_prep.decode.decode,
    ),
    "Stores": (infra.stores.store.Store,),
    "Networks, recipes, protocols": (
        network_config,
        network_variant,
        vit.recipes.recipe_named,
        vit.vtab.protocols.protocol_named,
    ),
}


def pages() -> dict[str, str]:
    """Markdown by its path below docs/."""
    if differing := differing_metrics():
        raise ValueError(f"METRICS in docs/generate.py and the code differ: {', '.join(differing)}. Correct METRICS.")
    made = {
        "commands": commands_page,
        "forms": forms_page,
        "fields": fields_page,
        "names": names_page,
        "metrics": metrics_page,
        "environment": environment_page,
        "python": python_page,
    }
    return {f"reference/{name}.md": page() for name, page in made.items()}


# Commands


def commands_page() -> str:
    command = typer.main.get_command(app)
    parts = [
        "# Commands",
        "`vitline --help` shows the same in a terminal. Every command takes `--help`. Exit codes: 0 done, 1 failed, 2 wrong "
        "usage or invalid configuration, 130 after Ctrl-C.",
        options_table(command),
    ]
    alone = [(name, sub) for name, sub in command.commands.items() if not hasattr(sub, "commands")]
    parts += [line for name, sub in alone for line in command_lines(f"vitline {name}", sub)]
    for name, group in command.commands.items():
        if hasattr(group, "commands"):
            parts += [f"## vitline {name}", text(group.help or "")]
            for sub_name, sub in group.commands.items():
                parts += command_lines(f"vitline {name} {sub_name}", sub)
    return joined(parts)


def command_lines(path: str, command: Any) -> list[str]:
    """The section of one command: usage, help, arguments, options, example."""
    help_text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    types = types_of(command)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, *(argument_usage(p) for p in arguments), "[OPTIONS]"])
    lines = [f"{'###' if path.count(' ') > 1 else '##'} {path}", f"```text\n{usage}\n```", text(help_text)]
    if arguments:
        rows = [[f"`{p.name.upper()}`", kind_text(types[p.name]), text(p.help or "")] for p in arguments]
        lines.append(table(["argument", "type", "what it is"], rows))
    lines.append(options_table(command))
    if example:
        lines += ["Example:", f"```sh\n{example.strip().strip('`')}\n```"]
    return lines


def types_of(command: Any) -> dict[str, Any]:
    """The types of the parameters of a command's function."""
    return get_type_hints(inspect.unwrap(command.callback))


def argument_usage(parameter: Any) -> str:
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def options_table(command: Any) -> str:
    types = types_of(command)
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    return table(["option", "type", "what it does"], [option_row(p, types[p.name]) for p in options])


def option_row(parameter: Any, kind: Any) -> list[str]:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    help_text = parameter.help or ""
    notes = [
        text(help_text),
        "Required." if parameter.required else "",
        f"Default: `{parameter.default}`." if shows_default(parameter) else "",
        "Repeatable." if parameter.multiple and "epeatable" not in help_text else "",
    ]
    shown = f"`{parameter.metavar}`" if parameter.metavar else kind_text(kind)
    return [names, shown, " ".join(filter(None, notes))]


def shows_default(parameter: Any) -> bool:
    """Whether the default is a value worth printing, and not in the help text already."""
    plain = isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool)
    return plain and not parameter.required and f"{parameter.default}" not in (parameter.help or "")


KINDS = {str: "`TEXT`", int: "`INTEGER`", float: "`NUMBER`", Path: "`PATH`", bool: "flag"}


def kind_text(kind: Any) -> str:
    """What is typed for a parameter: `TEXT`, `INTEGER`, one of the choices; a flag takes nothing."""
    if get_origin(kind) is Literal:
        return choices_text(kind)
    if get_args(kind):  # a list, or an optional value
        return kind_text(get_args(kind)[0])
    return KINDS[kind]


# Forms and config fields


def forms_page() -> str:
    parts = [
        "# Forms",
        "One form per flow. The Prefect UI shows it, its API takes it as `request`, and `vitline flows trigger --set "
        "FIELD=VALUE` changes single fields. [Config fields](fields.md) lists what `overrides` takes.",
    ]
    flows: dict[str, list[Deployment]] = {}
    for deployment in DEPLOYMENTS:
        flows.setdefault(deployment.flow, []).append(deployment)
    for flow, deployments in flows.items():
        form = deployments[0].model
        rows = [[f"`{name}`", *described(name, field)] for name, field in form.model_fields.items()]
        parts += [f"## {flow}", text(form.__doc__ or ""), table(["field", "type", "default", "what it is"], rows)]
        rows = [
            [f"`{d.full_name}`", text(d.purpose) or "-", f"`{d.cron}` (UTC)" if d.cron else "none", filled_in(d)]
            for d in deployments
        ]
        parts.append(table(["deployment", "purpose", "schedule", "filled in"], rows))
    parts += ["## Choices", "[Recipes, protocols, networks](names.md) and [Sources](fields.md#sources) describe them."]
    parts += [f"**{what.capitalize()}**: {choices_text(choice)}" for what, choice in NAMED_CHOICES.items()]
    return joined(parts)


def filled_in(deployment: Deployment) -> str:
    return ", ".join(f"{name} = `{value}`" for name, value in deployment.request.items()) or "defaults"


def described(name: str, field: FieldInfo) -> list[str]:
    """Type, default and help of a field, as cells of a table."""
    kind = type_text(field.annotation, field).replace("integer, more than 0", "integer, at least 1")
    return [kind, default_text(field), text(field.description or "")]


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or default in ((), {}, ""):
        return "empty"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default, ensure_ascii=False)}`"


NAMED_CHOICES = {
    "recipes": forms.RecipeName,
    "protocols": forms.ProtocolName,
    "kinds of sources": forms.SourceKind,
}
"""Long lists of choices, which stand once at the end of the forms."""
SPELLED = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "object", type(None): "empty"}


def type_text(annotation: Any, field: FieldInfo | None = None) -> str:
    """A type in words, with its bounds."""
    bounds = bounds_of(field.metadata) if field else ""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated
        inner, *metadata = arguments
        return type_text(inner) + bounds_of(metadata) + bounds
    if origin is Literal:
        named = next((what for what, choice in NAMED_CHOICES.items() if choice == annotation), None)
        return f"[one of the {named}](forms.md#choices)" if named else choices_text(annotation)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(part) for part in arguments if part is not type(None))) + bounds
    if origin in (tuple, list):
        return f"list of {type_text(arguments[0])}{bounds}"
    return SPELLED.get(origin or annotation, getattr(annotation, "__name__", str(annotation))) + bounds


def bounds_of(metadata: Iterable[Any]) -> str:
    """`, at least 1, less than 5`"""
    words = ""
    for limit in metadata:
        words += bounds_of(getattr(limit, "metadata", ()))
        for attribute, sign in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
            value = getattr(limit, attribute, None)
            words += "" if value is None else f", {sign} {value}"
    return words


def choices_text(choice: Any) -> str:
    return ", ".join(f"`{value}`" for value in get_args(choice))


def fields_page() -> str:
    """Every config field by its dotted name."""
    parts = [
        "# Config fields",
        "What `--set FIELD=VALUE` and the `overrides` of a [form](forms.md) take. Values are JSON, or plain text. The defaults "
        "are those of the config classes; a recipe, a preset or a protocol may set its own. `recipe` decides what comes out; "
        "`execution` decides how it is computed.",
        "## Preparation",
        fields_table(CorpusConfig, only=("recipe", "execution")),
        "## Sources",
        "`source.FIELD`, by the kind of the source (`--kind`).",
    ]
    for source in SOURCES:
        kind = source.model_fields["kind"].default
        parts += [f"### {kind}", text(source.__doc__ or ""), fields_table(source, "source.", without=("kind",))]
    parts += ["## Training", fields_table(TrainConfig, only=("recipe", "execution"), without=("model",))]
    parts += ["## Networks", "`recipe.model.FIELD`, by the architecture of the recipe."]
    for network in networks():
        architecture = network.model_fields["architecture"].default
        shown = fields_table(network, "recipe.model.", without=("architecture",))
        parts += [f"### {architecture}", text(network.__doc__ or ""), shown]
    parts += [
        "## Protocols",
        text(Protocol.__doc__ or ""),
        fields_table(Protocol, "protocol.", without=("kind", "name")),
    ]
    return joined(parts)


def networks() -> list[type[BaseModel]]:
    """The config class of every architecture."""
    union, *_ = get_args(AnyNetworkConfig)
    return [get_args(tagged)[0] for tagged in get_args(union)]


def fields_table(
    model: type[BaseModel], prefix: str = "", *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> str:
    rows = [[f"`{path}`", *described(path, field)] for path, field in leaves(model, prefix, only, without)]
    return table(["field", "type", "default", "what it is"], rows)


def leaves(
    model: type[BaseModel], prefix: str, only: Sequence[str] = (), without: Sequence[str] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Every field that is no group of fields, by its dotted path."""
    for name, field in model.model_fields.items():
        if (only and name not in only) or name in without:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.", (), without)
        else:
            yield f"{prefix}{name}", field


# Names, metrics, environment


def names_page() -> str:
    """Recipes, protocols, networks, tasks and presets."""
    protocols = [
        [
            f"`{row['protocol']}`",
            *(text(str(row[column])) for column in ("splits", "image side", "settings", "pictures")),
        ]
        for row in protocol_rows()
    ]
    tasks = [[f"`{task.corpus_name}`", task.group, str(task.num_classes)] for task in VTAB_TASKS]
    presets = [[f"`{name}`", text(type(make().source).__doc__ or "")] for name, make in PRESETS.items()]
    networks = [[f"`{name}`", text(network_variant(name).summary)] for name in REGISTERED]
    return joined(
        [
            "# Recipes, protocols, networks, tasks",
            "## Recipes",
            table(["recipe", "what it is"], [[f"`{name}`", text(recipe.what)] for name, recipe in RECIPES.items()]),
            "## Protocols",
            table(["protocol", "splits", "image side", "settings", "pictures"], protocols),
            "## Networks",
            "`vitline model variants` adds parameters and FLOPs; `vitline model show NAME` shows one.",
            table(["variant", "network"], networks),
            "## Tasks of VTAB",
            table(["corpus", "group", "classes"], tasks),
            "## Presets",
            table(["preset", "source"], presets),
        ]
    )


def metrics_page() -> str:
    parts = [
        "# Metrics",
        "Journals in the store hold them, MLflow shows them. Scores and accuracies are fractions from 0 to 1. Scores of the "
        "control end in `_from_scratch`; those of further models of one evaluation in `_<version>`. A preparation of several "
        "corpora also has each count as `data/<corpus>/...`.",
    ]
    for group, metrics in METRICS.items():
        rows = [[f"`{name}`", text(meaning)] for name, meaning in metrics.items()]
        parts += [f"## {group}", table(["metric", "meaning"], rows)]
    return joined(parts)


def differing_metrics() -> list[str]:
    """Metric names that only the code has, or only METRICS."""
    known = {name for metrics in METRICS.values() for name in metrics}
    written = {name for name in known if "<" not in name and not name.startswith(PUT_TOGETHER)}
    groups = "|".join({name.split("/")[0] for name in written})
    found = {value for value in texts_in_code() if re.fullmatch(rf"(?:{groups})/[a-z0-9_]+", value)}
    samples = {name.replace("node0", "node<k>") for name in sampled()}
    return sorted((found ^ written) | (samples - known))


PUT_TOGETHER = ("data/", "system/", "vtab/")
"""Metrics whose names the code makes from parts."""


def sampled() -> set[str]:
    sampler = SystemSampler(lambda *_: None, 0, lambda: 0, lambda: 0)
    return set(sampler.sample())


def texts_in_code() -> Iterator[str]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def environment_page() -> str:
    rows = []
    for field in Settings.model_fields.values():
        assert isinstance(field.validation_alias, AliasChoices)
        names = ", ".join(f"`{name}`" for name in field.validation_alias.choices)
        rows.append([names, text(field.description or "")])
    return joined(
        [
            "# Environment",
            "Variables that vitline reads. One that is empty counts as absent. Credentials of S3 are read by botocore "
            "(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_PROFILE`), in every process that needs "
            "them; vitline never passes them on.",
            table(["variable", "what it is"], rows),
        ]
    )


# Python


def python_page() -> str:
    parts = [
        "# Python",
        "What other programs use. Everything else may move between releases.",
    ]
    for title, members in API.items():
        parts.append(f"## {title}")
        for member in members:
            parts += class_lines(member) if inspect.isclass(member) else function_lines(member)
    return joined(parts)


def function_lines(function: Callable[..., Any]) -> list[str]:
    shown = f"from {function.__module__} import {function.__name__}\n\n{signature(function)}"
    return [f"### {function.__name__}", f"```python\n{shown}\n```", text(doc_of(function))]


def class_lines(cls: type) -> list[str]:
    shown = f"from {cls.__module__} import {cls.__name__}"
    lines = [f"### {cls.__name__}", f"```python\n{shown}\n```", text(doc_of(cls))]
    if issubclass(cls, BaseModel):
        rows = [[f"`{name}`", *described(name, field)[::2]] for name, field in cls.model_fields.items()]
        lines.append(table(["field", "type", "what it is"], rows))
    elif hasattr(cls, "__dataclass_fields__"):
        rows = [[f"`{name}`", f"`{kind}`"] for name, kind in annotations(cls).items()]
        lines.append(table(["field", "type"], rows))
    for name, member in vars(cls).items():
        function = inspect.unwrap(member) if inspect.isfunction(member) else None
        if function and not name.startswith("_") and inspect.getdoc(function):
            lines += [f"#### {cls.__name__}.{name}", f"```python\n{signature(function)}\n```", text(doc_of(function))]
    return lines


def annotations(cls: type) -> dict[str, str]:
    return {name: annotation_text(kind) for name, kind in inspect.get_annotations(cls).items()}


def signature(function: Callable[..., Any]) -> str:
    """`load_model(model: str | PathLike[str]) -> PublishedModel`, one parameter a line where it is long."""
    found = inspect.signature(function)
    parameters = [plain_names(str(p)) for p in found.parameters.values() if p.name != "self"]
    keyword_only = [i for i, p in enumerate(found.parameters.values()) if p.kind is p.KEYWORD_ONLY]
    if keyword_only:
        parameters.insert(keyword_only[0], "*")
    answer = found.return_annotation
    ending = "" if answer is found.empty else f" -> {annotation_text(answer)}"
    line = f"{function.__name__}({', '.join(parameters)}){ending}"
    if len(line) <= 100:
        return line
    return f"{function.__name__}(\n    " + ",\n    ".join(parameters) + f",\n){ending}"


def annotation_text(annotation: Any) -> str:
    whole = isinstance(annotation, type) and not get_args(annotation)
    return plain_names(f"{annotation.__module__}.{annotation.__qualname__}" if whole else str(annotation)).replace(
        "builtins.", ""
    )


def plain_names(code: str) -> str:
    """`vit.published.PublishedModel` -> `PublishedModel`."""
    unquoted = re.sub(r"'([A-Za-z_][\w.]*)'", r"\1", code).replace("numpy.", "np.")
    return re.sub(r"\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", unquoted)


def doc_of(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


# Markdown


def text(words: str) -> str:
    """Prose of the code as Markdown: outside of code spans nothing is markup, and line breaks do not count."""
    paragraphs = re.split(r"\n\s*\n", words.strip())
    return "\n\n".join(paragraph(" ".join(p.split())) for p in paragraphs)


def paragraph(words: str) -> str:
    pieces = words.split("`")
    if len(pieces) % 2 == 0:  # a lone backtick
        return escaped(words)
    return "`".join(piece if number % 2 else escaped(piece) for number, piece in enumerate(pieces))


def escaped(words: str) -> str:
    safe = html.escape(words, quote=False)
    return re.sub(r"([|*_\[\]])", r"\\\1", safe)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, or nothing where there are no rows."""
    body = [line(row) for row in rows]
    return "\n".join([line(head), line(["---"] * len(head)), *body]) if body else ""


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |"


def joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"
