"""OpenCV (extra `vtab`): two data sets need the same image operations as TFDS."""

from typing import Any


def opencv(data_set: str) -> Any:
    """The module cv2. Raises ValueError that says how to install it."""
    try:
        import cv2
    except ImportError as error:
        raise ValueError(
            f'{data_set}: its images are made with OpenCV, which is not installed. Run: pip install "vitline[vtab]"'
        ) from error
    return cv2
