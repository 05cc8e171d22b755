"""requirements.lock has the version and the files of all that any supported Python installs, not only the one that runs the tests."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain

import pytest
from packaging.utils import canonicalize_name

from docs.generate.licences import ROOT, SYSTEM, applying, pinned
from vitline.infra.local.install import pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ITSELF, OPTIONAL = PROJECT["project"]["name"], PROJECT["project"]["optional-dependencies"]


def requires_of(name, versions):
    """What an installed package requires; nothing of one that only another Python needs."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return []
    if package.version.partition("+")[0] != versions.get(name, package.version):
        pytest.skip(f"{name} {package.version} is installed, which is not the pinned version")  # as in .ci/lowest
    return package.requires or []


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11.0", "3.11.99", "3.12.0", "3.13.0", "3.13.99"])
def test_each_extra_has_every_package_that_a_supported_python_needs(python):
    versions, wrong = pinned(), []
    system = SYSTEM | {"python_version": python.rpartition(".")[0], "python_full_version": python}
    for extra in ("base", *OPTIONAL):
        chosen = {canonicalize_name(pin.name) for pin in pins(extra)}
        lines = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"], *OPTIONAL.get(extra, ())]
        waiting, asked = [(ITSELF, *found) for found in applying(lines, "", system)], set()
        while waiting:
            by, found, part = waiting.pop()
            name = canonicalize_name(found.name)
            if (name, part) in asked:
                continue
            asked.add((name, part))
            if name == ITSELF:
                waiting += [(name, *each) for each in applying(OPTIONAL.get(part, ()), "", system)]
                continue
            if name not in chosen or not found.specifier.contains(versions[name], prereleases=True):
                wrong.append(f"{extra}: {by} needs {found}")
            waiting += [(name, *each) for each in applying(requires_of(name, versions), part, system)]
        assert len(asked) > (200 if extra == "dev" else 10)
    assert not wrong, "requirements.lock lacks these; run `make lock`"


def test_every_pin_has_hashes_and_dev_has_every_pin():
    assert len(pins()) == (ROOT / "requirements.lock").read_text().count("\n# for: ") > 200
    assert pins() == pins("dev")
    assert set(chain(*(pin.extras for pin in pins()))) == {"base", *OPTIONAL}, "run `make lock`"
