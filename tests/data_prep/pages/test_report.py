"""The report shows the counts for any names and images, and stays small at 21,841 classes."""

import dataclasses
import re
import threading

import numpy as np
import pytest

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.labels.classes import ClassInfo, ClassMap
from vitline.data_prep.pages.report import render_report
from vitline.data_prep.plan.corpus_stats import CorpusStats, Finding, Findings, Leak, SampleRow, SampleRule, SplitStats
from vitline.data_prep.shard_format import Counts, Manifest, SegmentInfo, SplitInfo

from ...elements import Elements
from ...pictures import noise as noise_of

HOSTILE = '<script>alert("1")</script>&é'
COLOURS = "\x1b[31m\x07"


def row(name, base="memory://pictures"):
    return SampleRow(name, 0, base, name, 0, None)


def class_map_of(number):
    return ClassMap(
        classes=tuple(ClassInfo(name=f"class {i} {HOSTILE}{COLOURS}", source_id=f"n{i:08d}") for i in range(number))
    )


def stats_of(num_classes, counts=(30, 5, 2), **changes):
    arrays = {"labels_per_image": 33, "side_px": 90, "aspect_ratio": 113, "file_bytes": 128}
    every = {name: np.zeros(size, np.int64) for name, size in arrays.items()}
    for name in every:
        every[name][40 if name != "labels_per_image" else 1] = 7
    splits = {}
    for name, n in zip(("train", "val", "test"), counts, strict=True):
        own = np.arange(num_classes, dtype=np.int64) * n // max(1, num_classes - 1)
        splits[name] = SplitStats(int(own.sum()), 1000, own)
    rule = SampleRule()
    stats = CorpusStats(
        num_classes=num_classes,
        rule=rule,
        splits=splits,
        **every,
        kinds={"JPEG RGB": 7},
        refused={},
        sheet={label: (row(f"{HOSTILE} {label}"),) for label in rule.labels(num_classes).tolist()},
        duplicates={},
        leakage={},
        compared=frozenset({("pets/1", "test"), ("birds/2", "val")}),
    )
    return dataclasses.replace(stats, **changes)


def manifest_of(stats):
    def split(name, own):
        segments = (SegmentInfo(split=name, name="s000", num_rows=own.num_rows, num_shards=1),)
        return SplitInfo(
            num_rows=own.num_rows, rows_per_row_group=8, row_groups_per_shard=8, segments=segments, digest=""
        )

    return Manifest(
        name="folder",
        version="abc",
        digest="d" * 64,
        class_map_digest="c" * 64,
        num_classes=stats.num_classes,
        single_label=True,
        order_seed=0,
        splits={name: split(name, own) for name, own in stats.splits.items() if own.num_rows},
        decode_policy=DecodePolicy(),
        counts=Counts(num_found=7, num_accepted=7, num_refused=0, num_bytes=3000, refused={}),
        provenance={"request": {"name": HOSTILE}, "credit": HOSTILE, "seconds": {"examine": 3.5, "write": 0.0}},
    )


def render(stats, load=lambda row: noise_of(len(row.example_id), (90, 130))):
    return render_report(manifest_of(stats), class_map_of(stats.num_classes), stats, load)


def words(page):
    """The visible text of the page."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.S)))


def test_page_is_self_contained_and_escapes_names():
    page = render(stats_of(3))
    assert not {"\x1b", "\x07"} & set(page)
    assert r"\x1b[31m\x07" in page
    tags = Elements(page).found
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "b2"}
    links = [attrs[name] for _, attrs in tags for name in ("src", "href", "onerror", "onclick") if name in attrs]
    assert len(links) == 3
    assert all(link.startswith("data:image/webp;base64,") for link in links)
    assert any(attrs.get("alt", "").startswith(HOSTILE) for _, attrs in tags)


def test_leakage_is_shown_first_with_both_images():
    found = Findings(214, 0, (Finding(row("ours"), "near", row("theirs")),))
    left_out = Findings(1, 1, (Finding(row("ours"), "near", row("theirs")),))
    leakage = {Leak("pets/1", "test", "train"): found, Leak("birds/2", "val", "val"): left_out}
    page = render(stats_of(3, leakage=leakage))
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[0] == "Leakage"
    text = words(page)
    assert "214 training images match the test split of pets/1. They are still in this corpus" in text
    assert "1 validation image matches the val split of birds/2. All of them are left out" in text
    assert page.count('alt="ours"') == page.count('alt="theirs"') == 2


@pytest.mark.parametrize(
    ("compared", "recipe", "sentence"),
    [
        ([("pets/1", "test")], {}, "None found. No training image of this corpus shows one of the evaluation images"),
        ([], {}, "Not checked. This corpus was not compared with any evaluation set"),
        ([], {}, "The splits of this corpus were not compared with each other"),
        ([], {"near_duplicates": "drop"}, "splits of this corpus were compared with each other (recipe.near_dup"),
    ],
)
def test_the_page_states_what_was_compared(compared, recipe, sentence):
    stats = stats_of(3, compared=frozenset(compared))
    manifest = manifest_of(stats).model_copy(update={"provenance": {"request": {"recipe": recipe}}})
    page = render_report(manifest, class_map_of(3), stats, lambda row: noise_of(len(row.example_id), (90, 130)))
    assert sentence in words(page)


def test_missing_images_show_the_reason():
    refused = {
        "decoder_crash": Findings(1, 1, (Finding(row("crash"), "killed by signal 11"),)),
        "aspect_ratio": Findings(1, 1, (Finding(row("long"), "900 x 3 pixels"),)),
        "small_class": Findings(
            9, 9, (Finding(row("small"), "no class with 5"), Finding(row("gone")), Finding(row("bad")))
        ),
        "unsafe_path": Findings(1, 1, (Finding(row("../x", base="")),)),
    }
    loaded = []

    def load(row):
        loaded.append(row.example_id)
        if row.example_id == "gone":
            raise FileNotFoundError(row.key)
        return b"no image" if row.example_id == "bad" else noise_of(len(row.example_id), (90, 130))

    stats = stats_of(3, refused=refused)
    page = render(stats, load)
    shown = {attrs["title"]: tag for tag, attrs in Elements(page).found if "title" in attrs}
    assert {name: shown[name] for name in ("crash", "long", "small", "gone", "bad", "../x")} == {
        "crash": "div",
        "long": "img",
        "small": "img",
        "gone": "div",
        "bad": "div",
        "../x": "div",
    }
    assert "not read: FileNotFoundError" in page
    assert not {"crash", "../x"} & set(loaded)  # an image that crashed a decoder is not even read


def test_an_image_that_was_never_decoded_cannot_break_the_report(monkeypatch):
    # takes no arguments: the process fails at every image
    monkeypatch.setattr("vitline.data_prep.examine.decode_sandboxed.PIXELS", "os.abort")
    refused = {"aspect_ratio": Findings(1, 1, (Finding(row("long"), "900 x 3 pixels"),))}
    page = render(stats_of(2, refused=refused))
    assert re.search(r'<div class="pic none" title="long">decoder crash</div>', page)


def test_images_are_read_in_parallel():
    together = threading.Barrier(3, timeout=120)

    def load(row):
        together.wait()
        return noise_of(len(row.example_id), (90, 130))

    assert render(stats_of(3), load).count("<img") == 3


def test_page_of_21841_classes_is_small():
    rule = SampleRule()
    sheet = {label: tuple(row(f"{label} {i}") for i in range(6)) for label in rule.labels(21_841).tolist()}
    pairs = Findings(9, 0, tuple(Finding(row(f"a{i}"), "near", row(f"b{i}")) for i in range(8)))
    leakage = {Leak(f"task{i:02d}/1", "test", "train"): pairs for i in range(30)}
    noise = noise_of(len("noise"), (90, 130))  # images that hardly compress
    full = {
        "leakage": leakage,
        "duplicates": dict.fromkeys(("same_file", "same_pixels", "near", "conflicting_labels", "across_splits"), pairs),
        "refused": dict.fromkeys(("small_class", "unknown_class"), pairs),
    }
    page = render(stats_of(21_841, (3000, 50, 0), sheet=sheet, **full), lambda row: noise)
    assert len(page.encode()) < 3_000_000
    assert "All 21,841 classes by name" in page
    assert page.count("<tr>") < 200
    assert page.count(" matches ") + page.count(" match ") >= 30


def test_class_sizes_are_shown_in_full_or_summarised():
    assert '<span class="n">37</span>' in render(stats_of(3))  # 30 + 5 + 2 pictures of class 2
    # Class i of 1,001 holds i pictures, 500,500 in all: the largest 293 hold 250,222, and 294 hold 250,929.
    many = words(render(stats_of(1001, (1000, 0, 0))))
    assert "train 0 100 250 500 750 900 1,000 294 1 " in many
    assert "The 20 largest" in many
