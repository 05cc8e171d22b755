"""Vision Transformers, pre-trained on your own images. `from vitline import load_model` loads a published one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitline.vit.published.models import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> object:
    # Imported on use: torch takes a second, and preparation workers do not have it.
    if name == "load_model":
        from vitline.vit.published.models import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
