"""Letters: outlines of a hand-made font, and the real fonts: each has every letter, and no font is in two splits."""

import io
import string
from collections import Counter

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from vitline.data_prep.config import CorpusRecipe, Letters
from vitline.data_prep.examples.drawings import draw
from vitline.data_prep.examples.letters import LetterCorpus, letter_shapes
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store


def _font() -> bytes:
    """Every letter is a rectangle twice as high as wide, partly below the base line, with a notch at its top right."""
    pen = TTGlyphPen(None)
    corners = [(100, -100), (300, -100), (300, 100), (200, 100), (200, 300), (100, 300)]
    pen.moveTo(corners[0])
    for corner in corners[1:]:
        pen.lineTo(corner)
    pen.closePath()
    glyph, names = pen.glyph(), [".notdef", *string.ascii_lowercase]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): letter for letter in string.ascii_lowercase})
    builder.setupGlyf(dict.fromkeys(names, glyph))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (400, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Blocks"})
    builder.setupOS2()
    builder.setupPost()
    file = io.BytesIO()
    builder.save(file)
    return file.getvalue()


def test_a_letter_is_drawn_upright_in_the_middle_and_as_large_as_fits():
    shapes = letter_shapes(_font())
    assert list(shapes) == list(string.ascii_lowercase)
    shape = shapes["q"]
    lit = np.asarray(Image.open(io.BytesIO(draw(shape, shape["width"], shape["height"]))).convert("L")) > 127
    rows, columns = lit.any(axis=1).nonzero()[0], lit.any(axis=0).nonzero()[0]
    assert (len(rows), len(columns)) == (57, 28)  # of 64 pixels, with margins of 6 % of the height
    assert (rows[0], columns[0]) == (4, 18)
    assert lit[10, 20]
    assert not lit[10, 40]  # the notch is at the top right
    assert lit[55, 40]


@pytest.mark.slow
def test_each_font_has_every_letter_and_is_in_one_split(drawn_cache, memory_root):
    work = WorkFolder(open_store(memory_root), open_store(f"{memory_root}/letters"), 500)
    listed = list(LetterCorpus(Letters(cache=drawn_cache(LetterCorpus)), CorpusRecipe()).listing(work))
    assert Counter(example.split for example in listed) == {"train": 780, "val": 208, "test": 520}
    assert set(Counter(example.labels for example in listed).values()) == {58}
    assert len({(example.group, example.split) for example in listed}) == 58
    drawn = [open_store(e.base).read(e.key, e.offset, e.offset + e.length) for e in listed]
    assert all(data.startswith(b"\x89PNG") for data in drawn)
    assert len(set(drawn)) > 0.99 * len(drawn)
