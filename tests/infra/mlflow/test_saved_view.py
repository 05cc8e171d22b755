"""The saved view of an experiment, and changes that users make to it in the MLflow UI."""

import base64
import hashlib
import json
import zlib

from vitline.infra.mlflow.saved_view import VIEW_KEY, changed_tags

TAG = f"mlflow.sharedViewState.{VIEW_KEY}"


def columns(tags):
    view = json.loads(tags[TAG])
    assert view["name"] == "vitline scores"
    packed = view["state"].removeprefix("deflate;")
    selected = json.loads(zlib.decompress(base64.b64decode(packed)))["selectedColumns"]
    assert selected[:2] == ["attributes.`Duration`", "tags.`vitline.state`"]
    return selected[2:]


def test_new_metrics_are_added_to_the_view_and_nothing_is_sent_twice():
    tags = changed_tags({}, ["tasks/pets/top1", "val/top1", "time/prepare_s"], 1)
    assert columns(tags) == ["metrics.`val/top1`", "metrics.`tasks/pets/top1`"]
    assert changed_tags(tags, ["val/top1"], 2) == {}
    tags |= changed_tags(tags, ["vtab/mean"], 3)
    assert columns(tags) == ["metrics.`val/top1`", "metrics.`vtab/mean`", "metrics.`tasks/pets/top1`"]
    assert changed_tags({}, ["time/prepare_s"], 4) == {}


def test_view_that_a_user_changed_or_deleted_is_left_alone():
    tags = changed_tags({}, ["val/top1"], 1)
    renamed = tags | {TAG: tags[TAG].replace("vitline scores", "mine")}
    assert changed_tags(renamed, ["tasks/pets/top1"], 2) == {}
    assert changed_tags(tags | {TAG: "no json"}, ["tasks/pets/top1"], 2) == {}
    assert changed_tags({name: value for name, value in tags.items() if name != TAG}, ["val/top1"], 2) == {}


def test_view_of_many_tasks_fits_one_tag_and_is_stable():
    metrics = [f"tasks/{i}-{hashlib.sha256(bytes([i])).hexdigest()}/top1_from_scratch" for i in range(99)]
    tags = changed_tags({}, metrics, 1)
    assert len(tags[TAG]) <= 20_000
    assert changed_tags(tags, metrics, 2) == {}


def test_interrupted_first_write_is_not_taken_for_a_deletion():
    tags = changed_tags({}, ["val/top1"], 1)
    view = {TAG: tags[TAG]}
    assert list(tags) == [TAG, *changed_tags(view, ["val/top1"], 2)]
    assert columns(changed_tags(view, ["tasks/pets/top1"], 2))[0] == "metrics.`val/top1`"
