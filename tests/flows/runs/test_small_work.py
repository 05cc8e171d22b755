"""Small corpora are prepared without a cluster, by a child process that is claimed, followed and stopped like a job."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig
from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.prepare import small_work
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.prepare.small_work import fits_here
from vitline.flows.runs import services
from vitline.infra.config import replace
from vitline.infra.storage import open_store

from ...eventually import eventually
from ...pictures import noise


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        path = tmp_path / "birds" / ("owl", "wren")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(i, (20, 20)))
    return tmp_path / "birds"


@pytest.fixture
def no_ray(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "LocalRay", lambda *_: pytest.fail("a Ray was started"))
    monkeypatch.chdir(tmp_path)


def request_for(folder):
    return CorpusConfig(name="birds", source=ClassFolders(path=str(folder)))


@pytest.mark.slow
def test_a_small_corpus_is_prepared_without_ray_with_the_same_digest(vitline, folder, no_ray, tmp_path):
    root = str(tmp_path / "store")
    code, out, err = vitline("data", "prepare", "--source", folder, "--name", "birds", "--root", root)
    assert code == 0, err
    assert "40 of 40 in 2 classes" in " ".join(out.split())
    (manifest,) = prepare([request_for(folder)], str(tmp_path / "other"))
    assert Corpora(open_store(root)).find("birds").store.read_json("manifest.json")["digest"] == manifest.digest


@pytest.mark.slow
def test_an_error_of_a_small_source_is_one_sentence(vitline, folder, no_ray, tmp_path):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no picture")
    code, _, err = vitline("data", "prepare", "--source", folder, "--name", "birds", "--root", tmp_path / "store")
    assert code != 0
    assert "40 of 40 images are refused" in err
    assert "Traceback" not in err


def test_preparation_without_a_cluster_is_limited_in_images_and_bytes(folder, tmp_path, monkeypatch):
    request, root = request_for(folder), open_store(str(tmp_path / "store"))
    assert fits_here([request], root, one_machine=False)
    few = [replace(request, **{"execution.small_images": 39})]
    assert not fits_here(few, root, one_machine=False)
    assert fits_here(few, root, one_machine=True)
    assert not fits_here([replace(request, **{"execution.small_images": 0})], root, one_machine=True)
    both = [replace(request, **{"execution.small_images": 60, "name": name}) for name in ("birds", "more")]
    assert not fits_here(both, root, one_machine=False)
    assert fits_here(both[:1], root, one_machine=False)
    monkeypatch.setattr(small_work, "MAX_BYTES", 39 * 1000)
    assert not fits_here([request], root, one_machine=False)
    assert fits_here([request], root, one_machine=True)
    assert open_store(str(tmp_path / "store")).list() == []


def descendants(pid):
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = open(f"/proc/{entry}/stat").read().rpartition(")")[2].split()  # noqa: SIM115
            except OSError:
                continue
            found.setdefault(int(stat[1]), []).append(int(entry))
    every, waiting = [], [pid]
    while waiting:
        children = found.get(waiting.pop(), [])
        every, waiting = every + children, waiting + children
    return every


def is_alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.servers
def test_a_killed_command_leaves_no_process_and_the_same_command_resumes(vitline, folder, no_ray, tmp_path):
    root, environment = str(tmp_path / "store"), {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = ["data", "prepare", "--source", str(folder), "--name", "birds", "--root", root]
    process = subprocess.Popen(
        [sys.executable, "-m", "vitline.flows.cli.main", *command], env=environment, cwd=os.getcwd()
    )
    while process.poll() is None and not any("/records-" in key for key in open_store(root).list()):
        time.sleep(0.01)
    children = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not any(map(is_alive, children)))
    code, out, err = vitline(*command)
    assert code == 0, err
    assert "40 of 40 in 2 classes" in " ".join(out.split())
