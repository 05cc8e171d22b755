"""constraints.txt pins what any supported Python installs, not only the one that runs the tests."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain

import pytest
from packaging.utils import canonicalize_name

from docs.generate.licences import ROOT, SYSTEM, applying, pinned


def requires_of(name, pins):
    """What an installed package requires; nothing of one that only another Python needs."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return []
    if package.version.partition("+")[0] != pins.get(name, package.version):
        pytest.skip(f"{name} {package.version} is installed, which is not the pinned version")  # as in .ci/lowest
    return package.requires or []


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11.0", "3.11.99", "3.12.0", "3.13.0", "3.13.99"])
def test_every_package_that_a_supported_python_needs_is_pinned(python):
    project, pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], pinned()
    system = SYSTEM | {"python_version": python.rpartition(".")[0], "python_full_version": python}
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    waiting, asked, wrong = [(project["name"], *found) for found in applying(lines, "", system)], set(), []
    while waiting:
        by, found, extra = waiting.pop()
        name = canonicalize_name(found.name)
        if name == project["name"]:
            continue
        if name not in pins or not found.specifier.contains(pins[name], prereleases=True):
            wrong.append(f"{by} needs {found}")
        if (name, extra) not in asked:
            asked.add((name, extra))
            waiting += [(name, *each) for each in applying(requires_of(name, pins), extra, system)]
    assert len(asked) > 200
    assert not wrong, "constraints.txt lacks these; add the versions that pip chooses"
