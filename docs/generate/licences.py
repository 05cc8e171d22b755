"""Writes docs/licences.md: the licences of the packages that vitline needs, and the terms of the data sets that it names.

The page is kept in the repository, unlike the reference pages: a change of a licence then shows in the change of the version that
brings it, and the page is the same whatever is installed where the site is built.

python -m docs.generate.licences
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vitline.data_prep.examples.digits import DigitsCorpus
from vitline.data_prep.examples.icons import icon_sets
from vitline.data_prep.examples.letters import font_files
from vitline.flows.cli.vtab_corpora import official_files
from vitline.infra.local.install import pins

from .markdown import joined, table, text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
NOT_PRODUCT = ("docs", "dev")
"""Extras that only those need who change vitline."""

# The packages depend on system and Python; the page is that of the system on which the local stack is complete.
SYSTEM = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "Artistic-1.0-Perl",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
}
PERMISSIVE |= {"BSD", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MIT-0", "MIT-CMU", "Matplotlib", "PSF-2.0", "Zlib"}
COPYLEFT = {"MPL-2.0"}
"""Allowed too: it binds who changes a file of the package, not who uses it."""
SHORT = {  # what older metadata says, in lower case, and the identifier of SPDX
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD",
    "bsd license": "BSD",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
SHORT |= {name.lower(): name for name in (*PERMISSIVE, *COPYLEFT, "MIT OR Apache-2.0")}
READ = {  # where metadata is silent or inexact: what the package's licence file says
    "huey": "MIT",
    "matplotlib": "Matplotlib",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
    "resvg-py": "MIT",
    "skops": "MIT",
    "text-unidecode": "Artistic-1.0-Perl OR GPL-2.0-or-later",
}
BUNDLED = (
    "opencv-python-headless has FFmpeg (LGPL-2.1)",
    "numpy and scipy have libgfortran (GPL-3.0 with GCC's exception for linked programs) and libquadmath (LGPL-2.1)",
    "scikit-learn has libgomp (GPL-3.0 with the same exception)",
    "ml-dtypes and onnxruntime have Eigen (MPL-2.0)",
)


def pinned() -> dict[str, str]:
    """The versions of requirements.lock by normalised name."""
    return {canonicalize_name(pin.name): pin.version for pin in pins()}


def needed() -> dict[str, Distribution]:
    """The packages that vitline and its extras need, without those for work on vitline.

    Raises ValueError for one that is not installed in its pinned version: the page would be that of another one.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in NOT_PRODUCT]
    waiting = [found for lines in (project["dependencies"], *extras) for found in applying(lines, "")]
    packages: dict[str, Distribution] = {}
    asked, pins = {(project["name"], "")}, pinned()
    while waiting:
        found, extra = waiting.pop()
        name = canonicalize_name(found.name)
        if name == project["name"] or (name, extra) in asked:
            continue
        asked.add((name, extra))
        packages[name] = _installed(name, pins)
        waiting += applying(packages[name].requires or [], extra)
    return dict(sorted(packages.items()))


def applying(lines: Iterable[str], extra: str, system: Mapping[str, str] = SYSTEM) -> Iterator[tuple[Requirement, str]]:
    """Each requirement that applies where `extra` is asked for, with each of its extras; empty for the package alone."""
    for found in map(Requirement, lines):
        if found.marker is None or found.marker.evaluate({**system, "extra": extra}):
            yield from ((found, wanted) for wanted in ("", *found.extras))


def _installed(name: str, pins: dict[str, str]) -> Distribution:
    if name not in pins:
        raise ValueError(f"{name} is needed, but requirements.lock does not name it. Run `make lock`.")
    try:
        package = distribution(name)
        version = package.version.partition("+")[0]
    except PackageNotFoundError:
        version = "no version"
    if version != pins[name]:
        raise ValueError(
            f"{name}: {version} is installed, but requirements.lock has {pins[name]}. Make .venv anew with Python 3.11 or 3.12."
        )
    return package


def licence_of(package: Distribution) -> tuple[str, str]:
    """The licence of a package as an expression of SPDX names, and where it says so.

    Raises ValueError where its metadata does not say it in a known way, or says a licence that is not allowed.
    """
    name, metadata = canonicalize_name(package.name), package.metadata
    field = str(metadata.get("License") or "").strip()
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or [] if c.startswith("License :: ")]
    known = [SHORT[words.lower()] for words in classifiers if words.lower() in SHORT]
    if name in READ:
        found, where = READ[name], "licence file"
    elif expression := metadata.get("License-Expression"):
        found, where = str(expression), "License-Expression"
    elif SHORT.get(field.lower(), "BSD") != "BSD" and not any("General Public" in words for words in classifiers):
        found, where = SHORT[field.lower()], "License"
    elif len(set(known)) == 1 and len(known) == len(classifiers):
        found, where = known[0], "classifier"
    else:
        raise ValueError(
            f"{package.name} {package.version} states no known licence (License: {field[:60]!r}, classifiers: {classifiers}). Read its "
            "licence file; then add what it says to READ, or the words to SHORT, in docs/generate/licences.py."
        )
    if not allowed(found):
        raise ValueError(
            f"{package.name} {package.version} is under {found}, which is not among the allowed licences. Use another package, or add "
            "it to PERMISSIVE or COPYLEFT in docs/generate/licences.py, with the reason in the commit message."
        )
    return found, where


def allowed(expression: str) -> bool:
    """Whether every part of an expression, or one of its alternatives, is an allowed licence.

    >>> allowed("MPL-2.0 AND (GPL-3.0-only OR MIT)"), allowed("MIT AND GPL-3.0-only")
    (True, False)
    """
    parts = [part.strip("() ").split(" OR ") for part in expression.split(" AND ")]
    return all(any(choice.strip() in PERMISSIVE | COPYLEFT for choice in part) for part in parts)


def packages_part() -> str:
    """The sections on packages."""
    rows = []
    for name, package in needed().items():
        found, where = licence_of(package)
        rows.append([name, package.version.partition("+")[0], found, where])
    bound = [f"{name} ({found})" for name, _, found, _ in rows if re.search("MPL|GPL", found)]
    return joined(
        [
            "## Packages",
            f"{len(rows)} packages: those of vitline and all its extras but {' and '.join(NOT_PRODUCT)}, on Linux x86-64 with Python 3.12, "
            "in the versions of `requirements.lock`. The last column names the entry of the package's metadata that says it; "
            "`licence file` was read by a person. BSD alone: it does not say which of the BSD licences.",
            f"Copyleft, as the only licence, a part or a choice: {', '.join(bound)}. MPL-2.0 binds who changes and passes on a file of the "
            "package, not who uses it. Of a choice vitline takes the alternative that is not GPL.",
            "Metadata speaks of a package as a whole. Wheels carry libraries with licences of their own, copyleft among them: "
            + "; ".join(BUNDLED)
            + ". Their "
            "texts lie beside the installed packages. A torch for CUDA brings packages of NVIDIA, under NVIDIA's own terms.",
            table(["package", "version", "licence", "stated in"], rows),
        ]
    )


def data_part() -> str:
    """The sections on data sets and weights."""
    sets = dict.fromkeys((row["folder"], row["from"], row["terms"]) for row in official_files())
    drawn = [(found.package.spec, found.credit) for found in (*icon_sets(), *font_files())]
    return joined(
        [
            "## Data sets that vitline fetches",
            "The demo fetches the icons and fonts from the npm registry. The digits come with scikit-learn.",
            table(
                ["data set", "authors and licence"],
                [
                    *([f"npm:{name}", text(credit)] for name, credit in drawn),
                    [DigitsCorpus.origin, text(DigitsCorpus.credit)],
                ],
            ),
            "## Data sets that you download",
            "vitline fetches none of these; `vitline vtab files` lists their files. The terms are as far as they are known: those of "
            "the page count. Sources such as ImageNet-21k have the terms under which you got them.",
            table(
                ["data set", "from", "terms"],
                [[folder, home, text(terms)] for folder, home, terms in sorted(sets)],
            ),
            "## Test data",
            "`tests/infra/kubernetes/schemas.json.gz` is made of the schemas of Kubernetes, KubeRay and Kueue, all under Apache-2.0, by "
            "`tests/infra/kubernetes/write_schemas.py`.",
            "## Weights",
            "vitline fetches and contains no weights. Converted ones keep the terms of their authors.",
        ]
    )


def page() -> str:
    """The whole page."""
    note = (
        "The packages and data sets that vitline needs or names; none is part of its own files. Made by `make licences`; "
        "`tests/test_licences.py` compares it."
    )
    return joined(
        ["# Licences", "vitline itself is under Apache-2.0.", note, packages_part().strip(), data_part().strip()]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
