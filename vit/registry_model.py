"""The old place of `vit.serving.registry_model`, which versions of MLflow's registry name; to be removed after 0.2."""

from vit.serving.registry_model import RegistryModel, _load_pyfunc

__all__ = ["RegistryModel", "_load_pyfunc"]
