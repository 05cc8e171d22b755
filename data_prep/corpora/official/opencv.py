"""OpenCV, of the extra `vtab`: by its calls TFDS makes the pictures of two data sets."""

from typing import Any


def opencv(data_set: str) -> Any:
    """The module cv2. Raises ValueError that says how to install it."""
    try:
        import cv2
    except ImportError as error:
        raise ValueError(
            f'{data_set}: its pictures are made with OpenCV, which is not installed: pip install "vitline[vtab]"'
        ) from error
    return cv2
