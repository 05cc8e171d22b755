"""Jobs on a Ray that was started by another Python at another path: which Python runs them, and which versions it needs."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from vitline.data_prep.examples import presets
from vitline.flows.runs.prepare_corpus import prepare_corpora
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import open_services
from vitline.flows.runs.stage import StageFailed, run_store
from vitline.infra.config import replace
from vitline.infra.local.local_ray import LocalRay
from vitline.infra.runs.lease import read_lease
from vitline.infra.settings import Settings
from vitline.vit.run.resolved import resolve

pytestmark = [pytest.mark.slow, pytest.mark.servers, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A virtual environment of its own, whose `python` finds the same packages."""
    prefix = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    packages = next(prefix.glob("lib/python3*/site-packages"))
    # An editable install adds its path by a .pth file in our site-packages, which only `site` reads.
    (packages / "same.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return prefix, packages


@pytest.fixture(scope="module")
def foreign(elsewhere, tmp_path_factory):
    """The environment to use a cluster that was started by another Python than ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(elsewhere[0] / "bin" / "python"))
        started = LocalRay(tmp_path_factory.mktemp("ray"), num_cpus=2, object_store_bytes=150_000_000).__enter__()
    yield started.env
    started.__exit__()


@pytest.fixture
def services(foreign, root, tmp_path, monkeypatch):
    """services(python): the engines of a command that uses the foreign cluster; `python` is VITLINE_JOB_PYTHON."""
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)

    def use(python=None):
        return open_services(Settings(root=root, home=tmp_path, job_python=python))

    return use


def test_the_python_of_the_cluster_runs_the_job(services, elsewhere):
    """A preparation, which needs fewer processes than a training. Ray runs the work of both in the Python of its node."""
    on_workers = replace(presets.digits(), **{"execution.small_images": 0})
    with services() as used:
        _, key, result = prepare_corpora([on_workers], used)
        log = used.cluster.jobs.logs(read_lease(run_store(used.root, key)).job_id)
    assert result.state["state"] == "finished"
    assert f"python={elsewhere[0] / 'bin' / 'python'}" in log


def test_a_job_python_without_vitline_fails_with_the_variable_to_set(services, train_config, tmp_path):
    for python in (str(tmp_path / "nowhere" / "python"), str(Path(sys.base_prefix) / "bin" / "python3")):
        with pytest.raises(StageFailed, match="VITLINE_JOB_PYTHON") as refused, services(python) as used:
            train_model(resolve(train_config(f"named-{len(python)}", steps=3), used.root), used)
        assert python in str(refused.value)


def test_other_versions_are_named_before_the_training_starts(services, train_config, elsewhere):
    other = elsewhere[1] / "torch-99.0.dist-info"  # not vitline's: the metadata of a checkout would take precedence
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    try:
        with pytest.raises(StageFailed, match=r"torch 99\.0 \(submitted from torch ") as refused, services() as used:
            train_model(resolve(train_config("other-versions", steps=3), used.root), used)
    finally:
        (other / "METADATA").unlink()
        other.rmdir()
    assert str(elsewhere[0]) in str(refused.value)
