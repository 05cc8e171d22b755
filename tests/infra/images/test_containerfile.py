"""What infra/images/Containerfile says: its targets, their user, and what of the checkout a build may read."""

import re
from pathlib import Path

import pytest

from vitline.infra.settings import NO_TELEMETRY

ROOT = Path(__file__).parents[3]
TARGETS = ("prep", "train", "flows")


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of every stage, each with its words, by the name of the stage; those before the first stage under ''."""
    text = (ROOT / "infra" / "images" / "Containerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    found: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for line in filter(None, map(str.strip, lines)):
        instruction, _, words = line.partition(" ")
        if instruction == "FROM":
            stage = words.split(" AS ")[1]
            assert stage not in found
            found[stage] = []
        found[stage].append((instruction, words))
    return found


def words_of(stage: str, instruction: str) -> list[str]:
    return [words for name, words in stages()[stage] if name == instruction]


@pytest.mark.parametrize("target", TARGETS)
def test_targets_run_as_a_number_and_hold_only_what_was_copied_from_the_builder(target):
    (above,) = words_of(target, "FROM")
    assert above == f"runtime AS {target}"
    assert {name for name, _ in stages()[target]} == {"FROM", "LABEL", "COPY"}, "nothing runs, and nobody becomes root"
    assert words_of("runtime", "USER") == ["10001:10001"]
    assert words_of("runtime", "WORKDIR") == ["/tmp"], "flow runs work in the folder where they start"
    copied = [re.fullmatch(r"--from=(\S+) (/.*)", words) for words in words_of(target, "COPY")]
    assert all(found and found[1] in stages() for found in copied), "each from a stage, nothing from the checkout"


def test_a_base_can_be_chosen_and_every_stage_begins_with_it_or_another_stage():
    assert [name for name, _ in stages()[""]] == ["ARG"]
    for name in stages().keys() - {""}:
        (words,) = words_of(name, "FROM")
        assert words.split()[0] in ("${BASE}", *stages()), f"{name} begins with {words}"


def test_programs_in_an_image_report_nothing_home():
    (environment,) = words_of("runtime", "ENV")
    assert dict(word.split("=") for word in environment.split()).items() >= NO_TELEMETRY.items()


def test_the_readme_has_every_build_argument_with_its_default():
    arguments = [words.partition("=") for stage in stages() for words in words_of(stage, "ARG")]
    readme = (ROOT / "infra" / "images" / "README.md").read_text()
    rows = {row[0]: row[-1] for row in re.findall(r"^\| `([A-Z_]+)` \|(.*)\| (.*) \|$", readme, re.M)}
    assert rows.keys() == {name for name, _, _ in arguments}
    assert all(f"`{default.strip(chr(34))}`" == rows[name] for name, _, default in arguments if default)


def test_a_build_reads_the_sources_and_nothing_else_of_the_checkout():
    rules = [rule for rule in (ROOT / ".dockerignore").read_text().splitlines() if rule and not rule.startswith("#")]
    read = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert not [name for name in read if name.startswith(".")], ".vitline has passwords"
    assert all((ROOT / name).exists() for name in read)
    copied = {word for stage in stages() for words in words_of(stage, "COPY") for word in words.split()[:-1]}
    for source in {word for word in copied if not word.startswith(("--from=", "/", "."))}:
        assert (ROOT / source).is_file() or (ROOT / source).is_dir()
        assert source.split("/")[0] in read, f"{source} does not reach the build"
