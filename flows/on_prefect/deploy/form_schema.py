"""The form of a deployment as Prefect has it: its schema, and the text above it."""

from typing import Any

from prefect import Flow

from vitline.flows.catalog.registered_by import REMEMBERED
from vitline.flows.forms.overrides import override_paths
from vitline.flows.on_prefect.deployments import Deployment
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store


def form_schema(deployment: Deployment, settings: Settings) -> dict[str, Any]:
    """The form as a JSON schema for Prefect, with what later registrations compare under REMEMBERED."""

    def flow(request: Any) -> None:
        """Stands in for the deployment's flow: has its parameters."""

    flow.__annotations__ = {"request": deployment.model}
    schema = Flow(flow).parameters.model_dump(exclude_unset=True)
    for definition in schema.get("definitions", {}).values():
        if "properties" in definition:
            definition["properties"] = {name: without_null(field) for name, field in definition["properties"].items()}
    # Prefect allows additional properties at the outermost level: a misspelt "request" would start a run with the defaults.
    schema["additionalProperties"] = False
    root = open_store(settings.root).uri
    schema[REMEMBERED] = {"description": description_text(deployment), "root": root, "project": settings.project}
    return schema


def without_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of an optional field without pydantic's alternative `null`. Prefect's page would show the alternatives as a
    choice, and reject -5 as "not valid under any of the given schemas". Prefect accepts null for every field without a default.
    """
    *kinds, null = field.get("anyOf", [{}])
    if len(kinds) != 1 or null != {"type": "null"} or "enum" in kinds[0] or field.get("default") is not None:
        return field
    kind: dict[str, Any] = kinds[0]
    return {name: value for name, value in field.items() if name not in ("anyOf", "default")} | kind


def description_text(deployment: Deployment) -> str:
    """The text above the form: what the flow does, and which fields `overrides` takes."""
    paths = override_paths(deployment.flow)
    if not paths:
        return deployment.description
    listed = ", ".join(f"`{path}`" for path in paths)
    return (
        f"{deployment.description}\n\nFields for `overrides`: {listed}.\n\nPaths and URIs must not contain a user, password "
        "or query. If Prefect shows a regular expression, the help of the field describes the same rule in words."
    )
