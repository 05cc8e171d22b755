"""Whose a deployment in Prefect is: the form of each names the project that registered it. Imports no Prefect."""

from collections.abc import Mapping
from typing import Any

REMEMBERED = "x-vitline-registered"
"""Key in a form's schema, used by vitline only: the values of the last registration."""


def is_of_project(schema: Mapping[str, Any] | None, project: str) -> bool:
    """Whether this project registered the deployment with this form. A form that names no project belongs to any."""
    return bool((schema or {}).get(REMEMBERED, {}).get("project", project) == project)
