"""The pages of forms and of config fields."""

from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitline.data_prep.config import CorpusConfig
from vitline.flows.forms.nights import NightSettings
from vitline.flows.forms.prepare_config import SOURCES
from vitline.flows.on_prefect.deployments import DEPLOYMENTS, Deployment
from vitline.vit.config import TrainConfig
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.models.config import AnyNetworkConfig

from .markdown import joined, table, text
from .types_in_words import NAMED_CHOICES, choices_text, described


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
            [
                f"`{d.full_name}`",
                text(d.purpose) or "-",
                ", ".join(f"`{each.cron}` ({each.timezone})" for each in d.schedules) or "none",
                filled_in(d),
            ]
            for d in deployments
        ]
        parts.append(table(["deployment", "purpose", "schedule", "filled in"], rows))
    parts += ["## Choices", "[Recipes, protocols, networks](names.md) and [Sources](fields.md#sources) describe them."]
    parts += [f"**{what.capitalize()}**: {choices_text(choice)}" for what, choice in NAMED_CHOICES.items()]
    return joined(parts)


def filled_in(deployment: Deployment) -> str:
    return ", ".join(f"{name} = `{value}`" for name, value in deployment.request.items()) or "defaults"


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
        "## Nights",
        text(NightSettings.__doc__ or ""),
        fields_table(NightSettings, "nights."),
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
