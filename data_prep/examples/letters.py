"""Small letters of handwriting fonts, drawn in white on black at 64 pixels, as a task: which of 26 letters is it?

Train, val and test share no font, so the task asks for letters by other hands.
"""

import csv
import importlib.metadata
import importlib.util
import io
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitline.data_prep.config import CorpusRecipe, Letters
from vitline.data_prep.examples.drawings import DrawnCorpus, Shape, draw
from vitline.data_prep.examples.npm_package import NpmPackage, fetch_packages
from vitline.data_prep.sources.raw import RawExample, WorkFolder
from vitline.data_prep.sources.splits import filled_splits
from vitline.infra.storage import Store

_MARGIN = 0.06


@dataclass(frozen=True)
class FontFile:
    """A font, as a file of a package on npm."""

    name: str
    package: NpmPackage
    file: str
    credit: str


@cache
def font_files() -> tuple[FontFile, ...]:
    """All fonts, by name."""
    with Path(__file__).with_name("fonts.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            FontFile(
                name=row["font"],
                package=NpmPackage(
                    name=f"@expo-google-fonts/{row['font']}", version=row["version"], sha256=row["sha256"]
                ),
                file=row["file"],
                credit=f"{row['name']}, {row['author']}, {row['licence']}",
            )
            for row in csv.DictReader(file)
        )


class LetterCorpus(DrawnCorpus):
    """26 letters of each font. All letters of a font are one group, in one split."""

    name = "letters"

    def __init__(self, source: Letters, recipe: CorpusRecipe) -> None:
        super().__init__(source.cache)
        self._source = source
        self.packages = f"{len(font_files())} fonts"
        self.origin = f"{len(font_files())} fonts of npm:@expo-google-fonts"
        self.credit = "; ".join(found.credit for found in font_files())

    @staticmethod
    def made_from() -> tuple[list[str], tuple[Any, ...]]:
        if importlib.util.find_spec("fontTools") is None:
            raise ValueError("The letters are read by fonttools, which is not installed. Run: pip install fonttools.")
        rule = (_MARGIN, importlib.metadata.version("fonttools"))
        return [found.package.sha256 for found in font_files()], rule

    @staticmethod
    def draw_all(cache: Store) -> Iterator[tuple[str, bytes]]:
        wanted = {found.file for found in font_files()}
        fetched = fetch_packages([found.package for found in font_files()], cache, wanted.__contains__)
        for found, files in zip(font_files(), fetched, strict=True):
            file = files[found.file]
            font = cache.read(found.package.members_key, file.offset, file.offset + file.length)
            for letter, shape in letter_shapes(font).items():
                yield f"{found.name}/{letter}", draw(shape, shape["width"], shape["height"])

    def listing(self, work: WorkFolder) -> Iterator[RawExample]:
        cache = self.cache_below(work.root)
        fonts = {found.name: 1 for found in font_files()}
        splits = filled_splits(fonts, self._source.num_val_fonts, self._source.num_train_fonts)
        for file in self.files(cache):
            font, letter = file.name.split("/")
            yield self.example(cache, file, letter, splits[font], font)


def letter_shapes(font: bytes) -> dict[str, Shape]:
    """The outlines of the letters a to z in a TrueType font, each in the middle of a square box."""
    from fontTools.pens.boundsPen import BoundsPen
    from fontTools.pens.svgPathPen import SVGPathPen
    from fontTools.ttLib import TTFont

    opened = TTFont(io.BytesIO(font), lazy=True)
    glyphs, names = opened.getGlyphSet(), opened.getBestCmap()
    shapes = {}
    for letter in string.ascii_lowercase:
        path, bounds = SVGPathPen(glyphs), BoundsPen(glyphs)
        for pen in (path, bounds):
            glyphs[names[ord(letter)]].draw(pen)
        left, bottom, right, top = bounds.bounds
        side = (1 + 2 * _MARGIN) * max(right - left, top - bottom)
        shapes[letter] = Shape(
            body=f'<path transform="scale(1,-1)" fill="currentColor" d="{path.getCommands()}"/>',  # y points upwards
            left=(left + right - side) / 2,
            top=-(bottom + top + side) / 2,
            width=side,
            height=side,
        )
    return shapes
