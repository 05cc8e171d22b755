"""Addresses of MLflow's pages. Imports no MLflow."""

from vitline.infra.mlflow.mlflow_private import TRAINING_PAGES
from vitline.infra.redact import redact


def experiments_url(uri: str) -> str:
    """The page that lists the experiments of a server."""
    return f"{redact(uri)}/#/experiments{TRAINING_PAGES}"


def experiment_url(uri: str, experiment_id: str) -> str:
    """The page with the runs of an experiment."""
    return f"{redact(uri)}/#/experiments/{experiment_id}/runs{TRAINING_PAGES}"


def run_url(uri: str, experiment_id: str, run_id: str) -> str:
    """The page of a run."""
    return f"{redact(uri)}/#/experiments/{experiment_id}/runs/{run_id}{TRAINING_PAGES}"


def version_url(uri: str, name: str, version: str) -> str:
    """The page of a model version."""
    return f"{redact(uri)}/#/models/{name}/versions/{version}{TRAINING_PAGES}"
