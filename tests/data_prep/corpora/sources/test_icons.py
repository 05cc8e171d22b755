"""Icons: names, groups and drawings of hand-made examples, and a check of the real packages: the roles share nothing."""

import io

import numpy as np
import pytest
from PIL import Image

from vitline.data_prep.config import CorpusRecipe, Icons
from vitline.data_prep.examples.drawings import draw
from vitline.data_prep.examples.icons import (
    VARIANTS,
    Icon,
    IconCorpus,
    choose_icons,
    group_icons,
    icon_sets,
)
from vitline.data_prep.sources.raw import WorkFolder
from vitline.infra.storage import open_store


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("home", "home"),
        ("home-outline", "home"),
        ("home-24-filled", "home"),
        ("outline-home", "home"),
        ("bxs-home-heart", "home-heart"),
        ("arrow-left-bold-2", "arrow-left"),
        ("outline", "outline"),
        ("24", "24"),
    ],
)
def test_words_for_style_and_size_are_not_what_an_icon_shows(name, what):
    assert Icon("set", name).shows == what


def test_what_many_sets_of_a_role_show_is_a_class_of_this_role_only():
    task, pretraining = ([found.name for found in icon_sets() if found.role == role] for role in ("task", "pretrain"))
    assert (len(task), len(pretraining)) == (28, 23)
    names = {name: ["home", "home-thin", "home-fill"] for name in task[:16]}  # as many sets as a class needs
    names |= {name: ["cat"] for name in task[16:]}
    names |= {name: ["home", "dog"] for name in pretraining[:8]}
    names |= {name: ["dog-outline", "bird"] for name in pretraining[8:15]}
    chosen = choose_icons(names)
    assert {icon.shows for icon in chosen if icon.set in task} == {"home"}
    assert {icon.shows for icon in chosen if icon.set in pretraining} == {
        "dog"
    }  # homes are the task's; birds lack a set
    assert [icon.name for icon in chosen[:3]] == ["home", "home-fill", "home"]
    assert len(chosen) == 16 * VARIANTS + 15


def test_variants_of_an_icon_and_equal_drawings_are_one_group():
    sha256 = {Icon("a", "home"): "1", Icon("a", "home-fill"): "2", Icon("b", "house"): "2", Icon("b", "x"): "3"}
    assert group_icons(sha256) == {"a/home": "a/home", "b/house": "a/home", "b/x": "b/x"}


def test_an_icon_is_drawn_in_white_on_black_and_fills_its_box():
    square = '<path fill="currentColor" d="M2 0h2v4h-2z"/>'
    for shape in (
        {"body": square},
        {"body": square.replace("2 0", "3 1"), "left": 1, "top": 1, "width": 4, "height": 4},
    ):
        image = Image.open(io.BytesIO(draw(shape, 4, 4)))
        pixels = np.asarray(image.convert("RGB"))
        assert pixels.shape == (64, 64, 3)
        assert (pixels[:, 32:] == 255).all()
        assert (pixels[:, :32] == 0).all()
        assert image.getextrema()[3] == (255, 255)  # nothing is transparent


@pytest.mark.slow
def test_pretraining_and_task_share_no_set_no_class_and_no_drawing(drawn_cache, memory_root):
    listed, drawn = {}, {}
    for role in ("pretrain", "task"):
        work = WorkFolder(open_store(memory_root), open_store(f"{memory_root}/{role}"), 500)
        listed[role] = list(IconCorpus(Icons(role=role, cache=drawn_cache(IconCorpus)), CorpusRecipe()).listing(work))
        drawn[role] = [open_store(e.base).read(e.key, e.offset, e.offset + e.length) for e in listed[role]]
    for column in (lambda e: e.example_id.split("/")[0], lambda e: e.labels, lambda e: e.group):
        assert not set(map(column, listed["pretrain"])) & set(map(column, listed["task"]))
    assert not set(drawn["pretrain"]) & set(drawn["task"])
    splits = {split: {e.group for e in listed["task"] if e.split == split} for split in ("train", "val", "test")}
    assert not (splits["train"] | splits["val"]) & splits["test"]
    sizes = [sum(e.split == split for e in listed["task"]) for split in splits]
    assert sizes == [800, 200, 639]
    assert [len({e.labels for e in listed[role]}) for role in listed] == [411, 59]
    assert all(data.startswith(b"\x89PNG") for data in drawn["task"])
