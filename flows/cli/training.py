"""Runs and plans trainings and describes models for the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitline.flows import console
from vitline.flows.catalog.records import list_run_keys
from vitline.flows.cli.command_line import show_one
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.forms import PretrainRequest
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.plans.held_out import score_text
from vitline.flows.plans.training_plan import settings_of, training_plan
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import Services, open_services
from vitline.infra.html.text import field
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.cost.estimate import PlanGpus
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.models.user_code import kind_of
from vitline.vit.recipes import recipe_named
from vitline.vit.run.resolved import ResolvedTraining


def requested_training(root: str, corpora: Sequence[str], recipe: str, fields: Mapping[str, Any]) -> ResolvedTraining:
    """The training of a command line. Raises ValueError for a corpus, recipe, field or value that does not exist.

    Weights of another codebase are published below the root first.
    """
    found = {**with_named(fields, "recipe", recipe), **weighted(corpora)}
    if "init_from" in found:
        found["init_from"] = _published(root, found["init_from"])
    return resolve_pretrain(root, PretrainRequest.model_validate(found))


def with_named(fields: Mapping[str, Any], what: str, *names: str) -> dict[str, Any]:
    """The fields of a form with its recipe, or its protocols: an override if one is a file or function of the user. Raises
    ValueError for an unknown name."""
    named = names[0] if len(names) == 1 else [*names]
    if any(kind_of(name) for name in names):
        return {**fields, "overrides": {what: named, **fields["overrides"]}}
    for name in names:
        {"recipe": recipe_named, "protocol": protocol_of}[what](name)
    return {**fields, what: named}


def _published(root: str, source: str) -> str:
    """A published model or run as it was named; of a file or folder of another codebase the URI under which it is published."""
    if "@" in source or source in list_run_keys(open_store(root)):
        return source
    from vitline.flows.cli.models import published_uri

    return published_uri(root, source)


def weighted(corpora: Sequence[str]) -> dict[str, Any]:
    """The fields of a form for one corpus, or for several of the form CORPUS or CORPUS=WEIGHT."""
    if len(corpora) == 1:
        return {"corpus": corpora[0]}
    first, *others = (_weighted(text) for text in corpora)
    return {
        "corpus": first[0],
        "corpus_weight": first[1],
        "mix_with": [{"corpus": corpus, "weight": weight} for corpus, weight in others],
    }


def _weighted(text: str) -> tuple[str, float]:
    corpus, sign, weight = text.rpartition("=")
    try:
        return (corpus, float(weight)) if sign else (text, 1.0)
    except ValueError:  # the URI of a corpus may hold the sign
        return text, 1.0


def train_or_plan(settings: Settings, training: ResolvedTraining, *, plan: PlanGpus | None, as_json: bool) -> None:
    """Runs a training to its end, or prints its plan."""
    if plan:
        show_one(training_plan(training, plan), as_json)
        return
    with open_services(settings) as services:
        train_on(services, training, as_json=as_json)


def train_on(services: Services, training: ResolvedTraining, *, as_json: bool) -> None:
    """Runs a training to its end with open services, and prints its final state."""
    spec, result = train_model(training, services)
    shown = {"run": spec.run_key, "reused": result.reused, "wall_s": round(result.wall_s, 1), **result.state}
    if as_json:
        console.emit(shown)
        return
    show_one(shown, as_json=False)
    if score := score_text(result.state, labelled=training.config.recipe.masked_patches is None):
        console.print_result(score)


def show_plan(plan: Mapping[str, Any], training: ResolvedTraining, recipe: str, as_json: bool) -> None:
    """Prints a plan and where its settings come from: on a terminal those that are not at their defaults."""
    settings = settings_of(training.config, recipe)
    if as_json:
        show_one({**plan, "settings": settings}, as_json=True)
        return
    show_one(plan, as_json=False)
    chosen = [
        [path, field(path, one["value"]), one["origin"]] for path, one in settings.items() if one["origin"] != "default"
    ]
    show_table("Settings that are not at their defaults", ["field", "value", "from"], chosen)
