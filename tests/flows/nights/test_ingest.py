"""`nights.ingest`: a night adds the new images of the source of its corpus first, once, and leaves the corpus itself as it was."""

import json
import shutil
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.runs.end_to_end import prepare_stage
from vitline.flows.runs.prepare_corpus import prepare_corpora, source_request
from vitline.flows.runs.services import open_services
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

from ...pictures import blurred

NIGHT = datetime(2026, 11, 23, 2, tzinfo=UTC)
GROWING = {"overrides": {"nights.ingest": True}}


def plan_of(root, night=NIGHT, **changes):
    given = {"name": "nightly", "corpus": "birds", "recipe": "digits", "tasks": ("birds",), **changes}
    return resolve_pipeline(root, PipelineRequest(**given), night)


@pytest.fixture
def folder(tmp_path):
    def add(label, numbers):
        (tmp_path / "birds" / label).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (tmp_path / "birds" / label / f"{number}.jpg").write_bytes(blurred(number))

    add("jay", range(160))
    add("owl", range(500, 660))
    return SimpleNamespace(path=tmp_path / "birds", add=add)


@pytest.mark.slow
def test_a_night_trains_on_the_images_that_came_since(root, folder):
    with open_services(Settings(root=root)) as services:
        (base,), _, _ = prepare_corpora([source_request(root, str(folder.path), "birds")], services)

        def night(number):
            """What the stage recorded, and the manifest of the corpus to train on."""
            rows, plan = [], plan_of(root, datetime(2026, 11, number, 2, tzinfo=UTC), **GROWING)
            recorder = SimpleNamespace(stage=lambda *row: rows.append(row), note=lambda **_: None)
            corpora = prepare_stage(plan, services, recorder)
            return rows[0], corpora[0].manifest

        row, first = night(23)
        assert first.version == base.manifest.version
        assert "birds 320, birds 320 images, 0 new images" in row[4]
        assert row[1:3] == (None, True)
        folder.add("owl", range(700, 705))
        row, second = night(24)
        assert second.counts.num_accepted == 325
        assert second.added_to["version"] == first.version
        assert "5 new images" in row[4]
        assert row[1].startswith("prepare-birds")
        assert row[2] is False
        assert Corpora(open_store(root)).find("birds").store.uri.endswith(second.version)
        row, third = night(25)
        assert third.version == second.version
        assert "0 new images" in row[4]
        (folder.path / "jay" / "3.jpg").unlink()  # the source is another one, without anything new
        for number in (26, 27):
            row, fourth = night(number)
            assert fourth.version == second.version
            assert "0 new images" in row[4]
        assert load_manifest(open_store(base.uri)) == base.manifest


def test_of_a_night_the_key_does_not_change_when_its_corpus_has_grown(root, digits, tmp_path):
    keys = {plan_of(root, corpus=digits.uri, tasks=(digits.uri,), **GROWING).key}
    shutil.copytree(digits.uri.removeprefix("file://"), tmp_path / "copy")
    manifest = (tmp_path / "copy" / "manifest.json").read_text()
    (tmp_path / "copy" / "manifest.json").write_text(manifest.replace(load_manifest(digits).digest, "0" * 64))
    grown = {"corpus": str(tmp_path / "copy"), "tasks": (digits.uri,)}
    assert keys == {plan_of(root, **grown, **GROWING).key}
    by_hand = {plan_of(root, None, **given, **GROWING).key for given in (grown, grown | {"corpus": digits.uri})}
    assert len(by_hand) == 2
    assert keys.isdisjoint(by_hand | {plan_of(root, corpus=digits.uri, tasks=(digits.uri,)).key})


def test_a_preset_cannot_grow(root):
    with pytest.raises(ValueError, match=r"nights\.ingest: 'digits' is a preset, whose images stay the same"):
        plan_of(root, corpus="digits", tasks=("digits",), **GROWING)


def test_corpus_of_a_source_that_is_gone_cannot_grow(root, digits, tmp_path):
    """As those of the demo on emoji: they can be trained on, but this version cannot list their source."""
    shutil.copytree(digits.uri.removeprefix("file://"), tmp_path / "emoji")
    path = tmp_path / "emoji" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["provenance"]["request"]["source"]["kind"] = "emoji"
    path.write_text(json.dumps(manifest))
    given = {"corpus": str(tmp_path / "emoji"), "tasks": (digits.uri,)}
    assert plan_of(root, **given)
    with pytest.raises(
        ValueError, match=r"prepared by another version of vitline, from a source of kind 'emoji' or with fields"
    ):
        plan_of(root, **given, **GROWING)
