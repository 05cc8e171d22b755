"""Where the home page stands in Prefect."""

from vitline.flows.ops.prefect_http import pages_url, post
from vitline.infra.settings import Settings

KEY = "vitline"
"""Key of the artifact."""


def find_home(settings: Settings) -> str | None:
    """The id of the page, or None before it was first written. Raises OSError if Prefect does not answer."""
    wanted = {"artifacts": {"key": {"any_": [KEY]}}, "sort": "CREATED_DESC", "limit": 1}
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
