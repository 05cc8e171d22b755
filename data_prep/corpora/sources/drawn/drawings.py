"""Images that are drawn from outlines, in white on black, and kept in a cache: each set of them is drawn once."""

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NotRequired, Self, TypedDict

from data_prep.corpora.files.npm_package import PackageFile, PackageIndex
from infra.storage import Store

_SIDE_PX = 64


class Shape(TypedDict):
    """An outline and its box, as in icons.json."""

    body: str
    """What its svg element contains."""
    left: NotRequired[float]
    top: NotRequired[float]
    width: NotRequired[float]
    height: NotRequired[float]


def draw(shape: Shape, width: float, height: float) -> bytes:
    """The shape as a PNG of 64 x 64 pixels, as large as fits. `width`, `height`: of a box without its own."""
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=_svg(shape, width, height), background="black", skip_system_fonts=True))


def _svg(shape: Shape, width: float, height: float) -> str:
    box = (shape.get("left", 0), shape.get("top", 0), shape.get("width", width), shape.get("height", height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{_SIDE_PX}" '
        f'height="{_SIDE_PX}" viewBox="{" ".join(map(str, box))}">{shape["body"].replace("currentColor", "#fff")}</svg>'
    )


@dataclass(frozen=True)
class Drawings:
    """A set of drawn images in a cache: one object, with an index that is written after it."""

    name: str
    key: str
    """What the images follow from: the packages, the rule that chooses from them, and what draws them."""

    @classmethod
    def made_from(cls, name: str, packages_sha256: Iterable[str], *rule: Any) -> Self:
        """The set of this name. Raises ValueError without the package that draws it."""
        if importlib.util.find_spec("resvg_py") is None:
            raise ValueError(f"The {name} are drawn by resvg-py, which is not installed. Run: pip install resvg-py.")
        example = _svg({"body": "currentColor"}, 1, 1)
        text = json.dumps([list(packages_sha256), (example, *rule), importlib.metadata.version("resvg-py")])
        return cls(name, hashlib.sha256(text.encode()).hexdigest())

    @property
    def members_key(self) -> str:
        """The object that holds all images."""
        return f"{self.name}-{self.key[:12]}/members.bin"

    @property
    def index_key(self) -> str:
        return f"{self.name}-{self.key[:12]}/index.json"

    def kept(self, cache: Store) -> tuple[PackageFile, ...] | None:
        """The images in the cache, each with its range; None if they have to be drawn."""
        try:
            return PackageIndex.model_validate(cache.read_json(self.index_key)).members
        except FileNotFoundError:
            return None

    def keep(self, cache: Store, images: Iterable[tuple[str, bytes]]) -> tuple[PackageFile, ...]:
        """Writes the PNGs, each with its name, into the cache."""
        members, offset = list[PackageFile](), 0
        with cache.writer(self.members_key) as kept:
            for name, png in images:
                kept.write(png)
                sha256 = hashlib.sha256(png).hexdigest()
                members.append(PackageFile(name=name, offset=offset, length=len(png), sha256=sha256))
                offset += len(png)
        index = PackageIndex(package_sha256=self.key, members=tuple(members))
        cache.write_json(self.index_key, index.model_dump(mode="json"))
        return index.members
