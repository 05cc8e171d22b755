"""The old place of `serve_images`, which MLflow models that were saved by 0.1 import; to be removed after 0.2."""

from infra.mlflow.tracking import serve_images

__all__ = ["serve_images"]
