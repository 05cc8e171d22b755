"""The images of infra/images do their work as any user, without a name, on a read-only root: built and entered for real."""

import json
from pathlib import Path

import pytest

from ...pictures import noise
from ...servers.images import USER

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]  # packages are downloaded and unpacked several times


@pytest.fixture(scope="module")
def tmp(tmp_path_factory) -> Path:
    """The folder that is /tmp in all images, one after the other: with 40 pictures of two classes."""
    folder = tmp_path_factory.mktemp("tmp")
    for number in range(40):
        picture = folder / "pictures" / ("crow", "jay")[number % 2] / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(noise(number, (40, 40)))
    return folder


def said(done) -> str:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize(("target", "most_gb"), [("prep", 1.1), ("train", 2.1), ("flows", 2.3)])
def test_an_image_holds_what_it_promises_and_nothing_to_build_with(target, most_gb, images, tmp):
    images.build(target)
    config = images.config(target)
    assert config["User"] == "10001:10001"
    assert images.gigabytes(target) <= most_gb
    assert config["Labels"]["org.opencontainers.image.revision"] == "tested"
    found = said(
        images.enter(
            target,
            """
            vitline --version
            id -un 2>/dev/null && exit 1
            touch /opt/vitline/x 2>/dev/null && exit 1
            for program in cc gcc pip; do command -v $program && exit 1; done
            find / -xdev \\( -name .netrc -o -name pip.conf -size +0 -o -path '*/.cache/*' -o -path '/src*' \\) 2>/dev/null || true
            """,
            tmp,
        )
    )
    assert found.splitlines() == ["vitline 0.1.0", str(USER)]
    sbom = json.loads(said(images.enter(target, "cat /opt/vitline/sbom.cdx.json", tmp)))
    listed = {package["name"] for package in sbom["components"]}
    assert sbom["bomFormat"] == "CycloneDX"
    assert [name in listed for name in ("ray", "torch", "prefect")] == [True, target != "prep", target == "flows"]


NODE = """
    export VITLINE_ROOT=file:///tmp/store RAY_ADDRESS=http://127.0.0.1:8265
    ray start --head --node-ip-address 127.0.0.1 --num-cpus 2 >/tmp/ray-start
    """


def test_prep_prepares_by_itself_and_as_a_node_of_a_cluster(images, tmp):
    images.build("prep")
    prepare = "vitline data prepare --source /tmp/pictures --root file:///tmp/store --name"
    said(images.enter("prep", f"{prepare} alone", tmp))
    said(images.enter("prep", f"{NODE}\n{prepare} on-ray", tmp))
    found = [json.loads(path.read_text()) for path in (tmp / "store" / "corpora").glob("*/*/manifest.json")]
    assert {manifest["name"] for manifest in found} == {"alone", "on-ray"}
    assert {manifest["counts"]["num_accepted"] for manifest in found} == {40}


def test_train_passes_the_doctor_and_trains(images, tmp):
    images.build("train")
    found = said(images.enter("train", "vitline ops doctor --root file:///tmp/store", tmp))
    assert "installed; its pixels are equal" in found  # the native decoder
    own = "vitline train-folder --source /tmp/pictures --name own --root file:///tmp/store --steps 2 --yes"
    said(images.enter("train", own, tmp))
    (model,) = (tmp / "store" / "models" / "own").iterdir()
    assert model.stat().st_uid == USER


def test_flows_registers_its_flows_at_a_server(images, tmp):
    images.build("flows")
    script = """
        export VITLINE_ROOT=file:///tmp/store PREFECT_API_URL=http://127.0.0.1:4200/api
        prefect server start >/tmp/prefect-server 2>&1 &
        until python -c "import urllib.request as u; u.urlopen('$PREFECT_API_URL/health')" 2>/dev/null; do sleep 1; done
        prefect work-pool create vitline --type process >&2
        vitline flows deploy --pool vitline
        """
    assert "deployments registered" in said(images.enter("flows", script, tmp))
