"""A rectangle of an image."""

from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def words(self) -> str:
        """The box for people: width, height, left, top."""
        return f"{self.width} x {self.height} at ({self.left}, {self.top})"
