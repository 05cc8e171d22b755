"""docs/licences.md is that of the pinned packages, and no package without a known and allowed licence gets onto it."""

import re
from importlib.metadata import Distribution

import pytest

from docs.generate import licences

ROWS = re.findall(r"^\| (\S+) \| (\S+) \| ([^|]+) \| [^|]+ \|$", licences.PAGE.read_text(), re.MULTILINE)


def test_page_is_that_of_the_installed_packages():
    try:
        made = licences.page()
    except ValueError as error:
        if "is installed, but requirements.lock has" not in str(error):
            raise
        pytest.skip(f"the page is made with the pinned versions: {error}")  # as in .ci/lowest
    assert licences.PAGE.read_text() == made, "run `make licences`"


def test_page_names_the_pinned_versions_allowed_licences_and_all_data_sets():
    """As far as can be said whatever is installed."""
    versions = {name: version for name, version, _ in ROWS if version != "---"}
    del versions["package"]
    assert len(versions) > 100
    assert versions.items() <= licences.pinned().items(), "run `make licences`"
    assert all(licences.allowed(words) for name, _, words in ROWS if name in versions)
    assert licences.data_part().strip() in licences.PAGE.read_text()


@pytest.fixture
def package(tmp_path):
    """package(lines): an installed package whose metadata states its licence in these lines."""

    def installed(stated):
        folder = tmp_path / "stranger-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: stranger\nVersion: 1.0\n{stated}\n")
        return Distribution.at(folder)

    return installed


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("License-Expression: MIT AND (GPL-3.0-only OR MPL-2.0)", "MIT AND (GPL-3.0-only OR MPL-2.0)"),
        ("License: Apache 2.0\nClassifier: License :: OSI Approved :: Apache Software License", "Apache-2.0"),
        ("Classifier: License :: OSI Approved :: ISC License (ISCL)", "ISC"),
    ],
)
def test_a_licence_is_read_from_metadata_old_and_new(package, stated, expected):
    assert licences.licence_of(package(stated))[0] == expected


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ("License-Expression: MIT AND GPL-3.0-only", "not among the allowed"),
        ("License-Expression: MIT AND (GPL-3.0-only OR (MIT AND AGPL-3.0-only))", "not among the allowed"),
        (
            "License: MIT\nClassifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
            "no known licence",
        ),
        ("License: as it pleases the authors", "no known licence"),
        ("Classifier: License :: OSI Approved", "no known licence"),
        ("Summary: nothing", "no known licence"),
    ],
)
def test_a_package_with_an_unknown_or_forbidden_licence_is_refused_by_name(package, stated, problem):
    with pytest.raises(ValueError, match=rf"stranger 1\.0 .*{problem}.*docs/generate/licences\.py"):
        licences.licence_of(package(stated))
