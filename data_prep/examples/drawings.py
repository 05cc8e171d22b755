"""Images that are drawn from outlines, in white on black, and kept in a cache: each set of them is drawn once."""

import hashlib
import importlib.metadata
import importlib.util
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NotRequired, TypedDict

from vitline.data_prep.examples.packed_files import PackedFile, members_key, pack_files, packed_files
from vitline.data_prep.sources.raw import ListedCorpus, RawExample
from vitline.infra.storage import Store, open_store

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


class DrawnCorpus(ListedCorpus):
    """Examples among images that are fetched as outlines and drawn once, into the cache. A subclass says which and how."""

    name: ClassVar[str]
    packages: str
    """What is fetched, such as `51 sets of icons`."""

    def __init__(self, cache: str) -> None:
        self._cache_uri = cache

    @staticmethod
    @abstractmethod
    def made_from() -> tuple[list[str], tuple[Any, ...]]:
        """Checksums of the packages, and the rule that chooses and shapes what is drawn."""

    @staticmethod
    @abstractmethod
    def draw_all(cache: Store) -> Iterator[tuple[str, bytes]]:
        """Fetches the packages and draws: the name of each image and its PNG."""

    @classmethod
    def fingerprint_of(cls) -> str:
        """What the images follow from. Raises ValueError without the package that draws them."""
        if importlib.util.find_spec("resvg_py") is None:
            raise ValueError(
                f"The {cls.name} are drawn by resvg-py, which is not installed. Run: pip install resvg-py."
            )
        packages, rule = cls.made_from()
        example = _svg({"body": "currentColor"}, 1, 1)
        text = json.dumps([packages, (example, *rule), importlib.metadata.version("resvg-py")])
        return hashlib.sha256(text.encode()).hexdigest()

    def fingerprint(self) -> str:
        return self.fingerprint_of()

    def cache_below(self, root: Store) -> Store:
        return open_store(self._cache_uri) if self._cache_uri else root.child("sources")

    def fetch(self, root: Store, say: Callable[[str], None]) -> None:
        cache, key = self.cache_below(root), self.fingerprint()
        if packed_files(cache, _folder(self.name, key), key) is None:
            say(f"fetching {self.packages} (npm, kept by checksum in {cache.uri})")
        self.files(cache)

    @classmethod
    def files(cls, cache: Store) -> tuple[PackedFile, ...]:
        """The images; drawn into the cache if they are not in it. Raises FetchUnavailable if they cannot be fetched."""
        key = cls.fingerprint_of()
        folder = _folder(cls.name, key)
        return packed_files(cache, folder, key) or pack_files(cache, folder, key, cls.draw_all(cache))

    def example(self, cache: Store, file: PackedFile, label: str, split: str, group: str) -> RawExample:
        """The example that is this image."""
        return RawExample(
            example_id=file.name,
            labels=(label,),
            split=split,
            base=cache.uri,
            key=members_key(_folder(self.name, self.fingerprint())),
            offset=file.offset,
            length=file.length,
            group=f"{self.name}/{group}",
        )


def _folder(name: str, key: str) -> str:
    return f"{name}-{key[:12]}"
