"""The APIs of Prefect and MLflow by plain HTTP, for commands that must not import these."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from vitline.flows.ops.service_checks import ask
from vitline.infra.mlflow.pages import experiment_url
from vitline.infra.settings import Settings

_MOST_EXPERIMENTS = 1000


def api_url(settings: Settings) -> str:
    """The address of Prefect's API."""
    assert settings.prefect_api_url is not None
    return settings.prefect_api_url.rstrip("/")


def pages_url(settings: Settings) -> str:
    """The address of Prefect's pages: PREFECT_UI_URL, else those that the server shows by default, of the two styles that it may
    have. Where it does not say, those of every Prefect 3."""
    if settings.prefect_ui_url is not None:
        return settings.prefect_ui_url.rstrip("/")
    api = api_url(settings)
    if "/accounts/" in api:  # Prefect Cloud
        pages = api.replace("//api.", "//app.").replace("/api/", "/")
        return pages.replace("/accounts/", "/account/").replace("/workspaces/", "/workspace/")
    base = api.removesuffix("/api")
    try:
        return base + _default_pages(base)
    except OSError:
        return base


def flow_run_page(settings: Settings, flow_run_id: object) -> str:
    """The address of the page of a flow run."""
    return f"{pages_url(settings)}/runs/flow-run/{flow_run_id}"


@cache
def _default_pages(base: str) -> str:
    """The path of the pages that a server shows by default. Raises OSError if it does not answer."""
    reply = ask(f"{base}/ui-settings")
    try:
        known = json.loads(reply.text)
        return str(known[f"{known['default_ui']}_base_url"] or "").rstrip("/")
    except (ValueError, KeyError, TypeError):  # an older server, with one style
        return ""


def get(settings: Settings, path: str) -> Any:
    """Prefect's answer to a GET. Raises OSError if the server does not answer as Prefect does."""
    return _answer(settings, path)


def post(settings: Settings, path: str, form: Mapping[str, object]) -> Any:
    """Prefect's answer to a POST. Raises OSError if the server does not answer as Prefect does."""
    return _answer(settings, path, form)


def delete(settings: Settings, path: str) -> None:
    """Lets Prefect delete something. Raises OSError if it does not."""
    _answer(settings, path, method="DELETE")


def _answer(settings: Settings, path: str, form: Mapping[str, object] | None = None, method: str | None = None) -> Any:
    url = api_url(settings)
    reply = ask(f"{url}/{path}", settings.prefect_headers(), form, method)
    if not 200 <= reply.status < 300:
        raise OSError(f"{urlsplit(url).netloc} answers {path} with status {reply.status}: {reply.text[:120]}")
    try:
        return json.loads(reply.text) if reply.text else None
    except ValueError as unreadable:
        raise OSError(f"{urlsplit(url).netloc} answers {path} with a body that is not JSON") from unreadable


def experiment_pages(settings: Settings) -> dict[str, str]:
    """The pages with the runs of the project's experiments, by name. Empty before the first run, and where MLflow does not answer."""
    if (uri := settings.mlflow_tracking_uri) is None:
        return {}
    wanted = {"filter": f"name LIKE '{settings.project}/%'", "max_results": _MOST_EXPERIMENTS, "order_by": ["name"]}
    try:
        reply = ask(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search", settings.mlflow_headers(), wanted)
        found = json.loads(reply.text).get("experiments", ())
    except (OSError, ValueError):
        return {}
    return {each["name"]: experiment_url(uri.rstrip("/"), each["experiment_id"]) for each in found}
