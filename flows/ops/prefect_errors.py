"""Errors of Prefect's client as sentences, for commands."""

import json
import traceback
import urllib.request

import httpx

from vitline.infra.environment.certificates import CERTIFICATE_ADVICE
from vitline.infra.environment.proxies import through_proxy
from vitline.infra.redact import redact
from vitline.infra.settings import Settings


def sentence_of(error: BaseException) -> str:
    """What is wrong with the server at PREFECT_API_URL and what to do; empty for an error of something else."""
    url = Settings().prefect_api_url or ""
    if isinstance(error, ImportError) and "socksio" in str(error):
        proxies = {proxy for proxy in urllib.request.getproxies().values() if proxy.startswith("socks")}
        return (
            f"Prefect's client needs the package socksio for the proxy {redact(', '.join(sorted(proxies)))}, which this environment "
            "sets: `pip install socksio`, or unset it."
        )
    if isinstance(error, httpx.TransportError):
        if "certificate" in str(error).lower():
            return f"The certificate of Prefect at {url} is not accepted ({error}). {CERTIFICATE_ADVICE}"
        cause = str(error) or type(error).__name__
        proxy = through_proxy(url, all_proxy=True)
        return f"Prefect at {url} does not answer{proxy}: {cause}. Start the server, or correct PREFECT_API_URL."
    if isinstance(error, httpx.HTTPStatusError):  # Prefect's own errors derive from it, except for a missing object
        answer = error.response
        if answer.status_code in (401, 403):
            return (
                f"Prefect at {url} refuses access (status {answer.status_code}): set PREFECT_API_AUTH_STRING (own server) or "
                "PREFECT_API_KEY (Prefect Cloud)."
            )
        return (
            f"Prefect at {url} answers {answer.request.url.path} with status {answer.status_code}: {answer.text[:200]}"
        )
    if isinstance(error, json.JSONDecodeError) and any(
        "prefect/client/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)
    ):
        return f"{url} does not answer as Prefect's API does: correct PREFECT_API_URL, which ends in /api."
    return ""
