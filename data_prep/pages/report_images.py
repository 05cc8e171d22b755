"""Thumbnails of the report: read by many threads in parallel, decoded few at a time."""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.data_prep.examine.range_reads import read_located
from vitline.data_prep.plan.corpus_stats import CorpusStats, Findings, Leak, SampleRow
from vitline.infra.config import replace
from vitline.infra.html.page import data_uri
from vitline.infra.html.pictures import image_file, thumbnail
from vitline.infra.storage import open_store

# On S3 an image costs a round trip, not bandwidth: read one by one, a page took 40 s.
_READ_THREADS = 16
# An image may have 89 million pixels: a few hundred MB while it is decoded.
_DECODED_AT_ONCE = 2
_THUMBNAIL_PX, _THUMBNAIL_BYTES = 96, 4_000
_MAX_LEAKS_WITH_IMAGES = 8
_SHOWN = frozenset({"duplicate", "near_duplicate", "leakage", "small_class", "unknown_class"}) | frozenset(
    {"side_too_small", "side_too_large", "aspect_ratio", "refused_by_policy", "no_label"}
)
"""Reasons for which an image is left out after it was decoded, and those found before: it may be valid."""


def leaks_by_size(stats: CorpusStats) -> list[tuple[Leak, Findings, bool]]:
    """The largest leaks first, each with whether its images are shown: a root may hold dozens of evaluation sets."""
    ordered = sorted(stats.leakage.items(), key=lambda item: (-item[1].count, item[0]))
    return [(leak, found, rank < _MAX_LEAKS_WITH_IMAGES) for rank, (leak, found) in enumerate(ordered)]


class Images:
    """Thumbnails by the location of their bytes, or the reason why there is none."""

    def __init__(self, found: Mapping[tuple[object, ...], str]) -> None:
        self._found = found

    def show(self, row: SampleRow, reason: str = "") -> str:
        """A data URI or the reason; `reason` is why the example was refused."""
        return self._found.get(_place(row)) or reason.replace("_", " ") or "location unknown"


def _place(row: SampleRow) -> tuple[object, ...]:
    return row.base, row.key, row.offset, row.length


def read_sample(row: SampleRow) -> bytes:
    """The bytes of an image listed in the statistics. Raises FileNotFoundError if the image does not exist any more."""
    return read_located(open_store(row.base), row.key, row.offset, row.length)


def load_images(stats: CorpusStats, policy: DecodePolicy, load: Callable[[SampleRow], bytes]) -> Images:
    """All images that the report shows, decoded in a separate process: they may have changed since they were examined, and some
    were never decoded."""
    # Lift the limits for which an image may have been refused, in order to show it, except that on pixels, which bounds memory.
    lenient = replace(
        policy,
        formats=DecodePolicy().formats,
        cmyk="convert",
        sixteen_bit="high_byte",
        animation="first_frame",
        min_side_px=1,
        max_side_px=65_535,
        max_aspect_ratio=65_535,
    )
    room = threading.BoundedSemaphore(_DECODED_AT_ONCE)

    def shown(row: SampleRow) -> str:
        try:
            data = load(row)
            with room:
                return _thumbnail(decode_sandboxed(data, lenient))
        except ImageRejected as error:
            return error.reason.replace("_", " ")
        except Exception as error:  # a missing image must not prevent the report
            return f"not read: {type(error).__name__}"

    jobs = {_place(row): row for row in _shown(stats) if row.base}
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        return Images(dict(zip(jobs, pool.map(shown, jobs.values()), strict=True)))


def _shown(stats: CorpusStats) -> Iterable[SampleRow]:
    """Every image of the page that can be decoded."""
    for rows in stats.sheet.values():
        yield from rows
    leaks = (found for _, found, with_images in leaks_by_size(stats) if with_images)
    for found in (*leaks, *stats.duplicates.values()):
        for each in found.first:
            yield each.image
            if each.other:
                yield each.other
    for reason, found in stats.refused.items():
        if reason in _SHOWN:
            yield from (each.image for each in found.first)


def _thumbnail(pixels: np.ndarray) -> str:
    image, data = thumbnail(pixels, _THUMBNAIL_PX), b""
    for quality in (75, 40, 10):  # images of noise would make the page large
        data = image_file(image, "WEBP", quality=quality)
        if len(data) <= _THUMBNAIL_BYTES:
            break
    return data_uri(data, "WEBP")
