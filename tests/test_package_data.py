"""Files beside the code that a wheel must carry: setuptools includes only what pyproject.toml names."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("infra", "data_prep", "vit", "flows")
SUFFIXES = {".csv", ".css", ".j2", ".json", ".toml"}


def packaged(patterns):
    everywhere = {path for room in ROOMS for pattern in patterns.get("*", ()) for path in (ROOT / room).rglob(pattern)}
    return everywhere | {
        path
        for room in ROOMS
        for pattern in patterns.get(f"vitline.{room}", ())
        for path in (ROOT / room).glob(pattern)
    }


def test_a_wheel_carries_every_data_file_of_the_packages():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    there = {path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in SUFFIXES}
    native = ROOT / "vit/native"  # a package of its own
    assert {path for path in there if native not in path.parents} == packaged(patterns)


def test_every_pattern_of_one_package_names_a_file():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert [
        name for room in ROOMS for name in patterns.get(f"vitline.{room}", ()) if not (ROOT / room / name).is_file()
    ] == []
