"""Addresses of MLflow's pages. Imports no MLflow."""

from vitline.infra.redact import redact

# Without it MLflow's pages show every experiment as one of a chat model, with other menus. The pages of MLflow 3.17 read no tag for
# this, and go back to the choice of the browser where a link of their own leaves it out.
_TRAINING_PAGES = "?workflowType=machine_learning"


def experiments_url(uri: str) -> str:
    """The page that lists the experiments of a server."""
    return f"{redact(uri)}/#/experiments{_TRAINING_PAGES}"


def experiment_url(uri: str, experiment_id: str) -> str:
    """The page with the runs of an experiment."""
    return f"{redact(uri)}/#/experiments/{experiment_id}/runs{_TRAINING_PAGES}"


def run_url(uri: str, experiment_id: str, run_id: str) -> str:
    """The page of a run."""
    return f"{redact(uri)}/#/experiments/{experiment_id}/runs/{run_id}{_TRAINING_PAGES}"


def version_url(uri: str, name: str, version: str) -> str:
    """The page of a model version."""
    return f"{redact(uri)}/#/models/{name}/versions/{version}{_TRAINING_PAGES}"
