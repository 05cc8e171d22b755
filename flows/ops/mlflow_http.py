"""MLflow's API by plain HTTP, for commands that must not import MLflow."""

import json

from vitline.flows.ops.service_checks import ask
from vitline.infra.mlflow.pages import experiment_url
from vitline.infra.settings import Settings

_MOST = 1000


def experiment_pages(settings: Settings) -> dict[str, str]:
    """The pages with the runs of the project's experiments, by name. Empty before the first run, and where MLflow does not answer."""
    if (uri := settings.mlflow_tracking_uri) is None:
        return {}
    wanted = {"filter": f"name LIKE '{settings.project}/%'", "max_results": _MOST, "order_by": ["name"]}
    try:
        reply = ask(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search", settings.mlflow_headers(), wanted)
        found = json.loads(reply.text).get("experiments", ())
    except (OSError, ValueError):
        return {}
    return {each["name"]: experiment_url(uri.rstrip("/"), each["experiment_id"]) for each in found}
