"""Provides `load_served` under its old name, from which MLflow models saved by version 0.1 import it. Remove after 0.2."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "load_served":
        from vit.serving.mlflow_model import load_served

        return load_served
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
