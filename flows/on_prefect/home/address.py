"""Where the home page stands in Prefect."""

from vitline.flows.ops.server_http import pages_url, post
from vitline.infra.settings import Settings


def find_home(settings: Settings) -> str | None:
    """The id of the page, an artifact named after the project; None before it is written. Raises OSError if Prefect is away."""
    wanted = {"artifacts": {"key": {"any_": [settings.project]}}, "sort": "CREATED_DESC", "limit": 1}
    found = post(settings, "artifacts/filter", wanted)
    return str(found[0]["id"]) if found else None


def home_url(settings: Settings) -> str | None:
    """The address of the page, which stays the same; None where there is no page yet, or no Prefect that answers."""
    if settings.prefect_api_url is None:
        return None
    try:
        found = find_home(settings)
    except OSError:
        return None
    return f"{pages_url(settings)}/artifacts/artifact/{found}" if found else None
