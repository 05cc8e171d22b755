"""Forms: short, every field documented, choices complete, and errors in words."""

import inspect
import re
from typing import get_args

import pytest

from vitline.data_prep.examples.presets import PRESETS
from vitline.flows.forms import forms
from vitline.flows.forms.forms import PipelineRequest, PrepareRequest, PretrainRequest
from vitline.flows.forms.overrides import override_paths
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.prepare_config import SOURCES
from vitline.flows.on_prefect.deployments import DEPLOYMENTS
from vitline.flows.on_prefect.flow_run import read_request
from vitline.infra.config import FrozenConfig
from vitline.vit.evaluation.protocols import Protocol, known_protocols, protocol_named
from vitline.vit.recipes import RECIPES

FORMS = [
    form
    for form in vars(forms).values()
    if isinstance(form, type) and issubclass(form, FrozenConfig) and form is not FrozenConfig
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_is_short_and_documents_each_field(form):
    schema = form.model_json_schema()
    assert len(schema["properties"]) <= 15
    assert schema["additionalProperties"] is False
    assert schema["description"]
    for name, field in schema["properties"].items():
        assert len(field.get("description", "")) > 10, name


def test_every_deployment_starts_a_flow_that_takes_its_form():
    from vitline.flows.on_prefect import flows

    for deployment in DEPLOYMENTS:
        flow = getattr(flows, deployment.function)
        assert flow.name == deployment.flow
        assert deployment.entrypoint == f"{flow.__module__}.{deployment.function}"
        assert [*inspect.signature(flow.fn).parameters] == ["request"]
        assert deployment.form()
    assert len({deployment.description for deployment in DEPLOYMENTS}) == len(DEPLOYMENTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_images": -5}, "train_images: must be at least 1, not -5"),
        ({"train_images": 1.5}, "train_images: must be a whole number, not 1.5"),
        ({"deadline_hours": 0}, "deadline_hours: must be more than 0, not 0"),
        ({"from_scratch": "perhaps"}, "from_scratch: must be true or false, not 'perhaps'"),
        (
            {"name": "Big Name"},
            "name: must be lower case letters, digits and '-', a letter or digit first, not 'Big Name'",
        ),
        ({"name": 41 * "x"}, f"name: must have at most 40 characters, not '{41 * 'x'}'"),
        ({"tasks": "digits"}, "tasks: must be a list, not 'digits'"),
        ({"overrides": 3}, 'overrides: must be an object of names and values, as in {"recipe.seed": 1}, not 3'),
    ],
)
def test_every_violated_rule_is_reported_in_words(change, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        read_request(PipelineRequest, change, {})


def test_every_override_that_a_description_lists_exists(digits_root):
    root = digits_root
    paths = set(override_paths("pretrain-then-transfer"))
    assert {"recipe", "protocol"} < paths
    for path in paths - {"recipe", "protocol"}:
        assert path.startswith(("recipe.", "execution.", "protocol.", "nights."))
        missing = f"{path}x"
        with pytest.raises(ValueError, match=f"no field '{re.escape(missing)}'; .* Did you mean '{re.escape(path)}'"):
            resolve_pipeline(root, PipelineRequest(recipe="digits", overrides={missing: 1}))


def bounds(form, field):
    """The schema of a field, without the choice to leave it empty."""
    found = form.model_json_schema()["properties"][field]
    return next(part for part in found.get("anyOf", [found]) if part.get("type") != "null")


def test_choices_and_bounds_are_in_the_schema():
    assert bounds(PipelineRequest, "recipe")["enum"] == list(get_args(forms.RecipeName))
    assert bounds(PrepareRequest, "preset")["enum"] == list(get_args(forms.PresetName))
    assert bounds(PrepareRequest, "kind")["enum"] == list(get_args(forms.SourceKind))
    for kind in PipelineRequest.model_json_schema()["properties"]["protocol"]["anyOf"]:  # several, or one
        assert kind.get("items", kind)["enum"] == list(get_args(forms.ProtocolName))
    assert bounds(PipelineRequest, "train_images")["minimum"] == 1
    assert bounds(PretrainRequest, "peak_lr")["exclusiveMinimum"] == 0
    assert bounds(PrepareRequest, "val_fraction") | {"minimum": 0, "exclusiveMaximum": 1} == bounds(
        PrepareRequest, "val_fraction"
    )
    assert (bounds(PipelineRequest, "tasks")["minItems"], bounds(PipelineRequest, "tasks")["maxItems"]) == (1, 40)


def test_choices_are_complete():
    assert set(get_args(forms.RecipeName)) == set(RECIPES)
    assert set(get_args(forms.PresetName)) == set(PRESETS)
    kinds = {form.model_fields["kind"].default for form in SOURCES}
    assert set(get_args(forms.SourceKind)) == kinds - {"icons", "letters", "digits"}  # those three are presets
    assert get_args(forms.ProtocolName) == tuple(known_protocols())
    tuned = {name for name, protocol in known_protocols().items() if isinstance(protocol, Protocol)}
    assert set(get_args(forms.FinetuningName)) == tuned - {
        "small-images"
    }  # it takes its size from the images of a task
    with pytest.raises(ValueError, match=f"available: {', '.join(get_args(forms.ProtocolName))}"):
        protocol_named("none of them")


def test_omitted_fields_keep_the_values_of_the_deployment():
    filled = {"name": "birds", "train_images": 1000, "tasks": ["digits"]}
    request = read_request(PipelineRequest, {"seed": 3}, filled)
    assert (request.seed, request.name, request.train_images, request.tasks) == (3, "birds", 1000, ("digits",))
    assert read_request(PipelineRequest, {"train_images": None}, filled).train_images is None


def test_all_violated_rules_are_reported_together():
    with pytest.raises(ValueError, match=r"^recipe: .*not 'vit-g'; seed: must be at least 0, not -1$") as refused:
        read_request(PipelineRequest, {"seed": -1, "recipe": "vit-g"}, {})
    assert "\n" not in str(refused.value)
    with pytest.raises(
        ValueError, match=r"seeed: there is no such field; available: .*tasks, train_images\. Did you mean 'seed'\?$"
    ):
        read_request(PipelineRequest, {"seeed": 3}, {})
