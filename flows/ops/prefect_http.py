"""Prefect's API by plain HTTP, for commands that must not import Prefect."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from vitline.flows.ops.service_checks import ask
from vitline.infra.settings import Settings


def api_url(settings: Settings) -> str:
    assert settings.prefect_api_url is not None
    return settings.prefect_api_url.rstrip("/")


def pages_url(settings: Settings) -> str:
    """The address of Prefect's pages."""
    return api_url(settings).removesuffix("/api")


def post(settings: Settings, path: str, form: Mapping[str, object]) -> Any:
    """The answer to a POST. Raises OSError if the server does not answer as Prefect does."""
    url = api_url(settings)
    reply = ask(f"{url}/{path}", settings.prefect_headers(), form)
    if reply.status != 200:
        raise OSError(f"{urlsplit(url).netloc} answers {path} with status {reply.status}: {reply.text[:120]}")
    try:
        return json.loads(reply.text)
    except ValueError as odd:
        raise OSError(f"{urlsplit(url).netloc} answers {path} with a body that is not JSON") from odd
