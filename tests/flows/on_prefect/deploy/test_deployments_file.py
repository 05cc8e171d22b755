"""A deployments file: what it becomes, and how everything that is wrong in one is refused before a server is asked."""

import re
from pathlib import Path

import pytest

from vitline.flows.on_prefect.deploy.deployments_file import read_deployments
from vitline.flows.on_prefect.deploy.registered import beside_lines
from vitline.infra.settings import Settings

GUIDE = Path(__file__).parents[4] / "docs/guides/flows-and-nights.md"
TWO = """\
project: birds
defaults:
  pool: cpu
  job_variables: {env: {A: "1"}, working_dir: /data}
  tags: [vision]
deployments:
  - name: big
    flow: pretrain-then-transfer
    pool: h100
    job_variables: {working_dir: /nvme}
    tags: [gpu]
    description: The big one.
    concurrency: 2
    schedules:
      - {cron: "0 2 * * *", timezone: Europe/Berlin, active: true}
      - {cron: "0 14 * * 6", name: weekend}
    request: {name: big, corpus: birds, tasks: [city], recipe: digits}
  - name: default
    flow: reconcile
    schedules: [{cron: "*/15 * * * *"}]
"""


@pytest.fixture
def read(two_corpora, tmp_path, monkeypatch):
    """read(text): the deployments of a file in the project `birds`, whose root has the corpora birds and city."""
    monkeypatch.setenv("VITLINE_PROJECT", "birds")
    path = tmp_path / "deployments.yaml"

    def call(text):
        path.write_text(text)
        return read_deployments(str(path), Settings(root=two_corpora))

    return call


def test_defaults_hold_unless_a_deployment_says_otherwise(read):
    big, reconcile = read(TWO)
    assert (big.full_name, big.pool, big.concurrency) == ("pretrain-then-transfer/birds-big", "h100", 2)
    assert big.job_variables == {"env": {"A": "1"}, "working_dir": "/nvme"}
    assert big.tags == ["birds", "stage:pipeline", "vision", "gpu"]
    assert big.description.startswith("The big one. Prepares corpora")
    assert [(s.name, s.timezone, s.active) for s in big.schedules] == [
        ("default", "Europe/Berlin", True),
        ("weekend", "UTC", None),
    ]
    assert (reconcile.full_name, reconcile.pool, reconcile.tags[1:]) == (
        "reconcile/birds-default", "cpu", ["stage:ops", "vision"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "right", "place", "says"),
    [
        ("    pool: h100", "    pol: h100", "(line 9), big: pol: ", "no such field; available: concurrency, description,"),
        ("    pool: h100", "    pol: h100", "(line 9), big: ", "Did you mean 'pool'?"),
        ("timezone: Europe", "zone: Europe", "(line 15), big, schedule 1: zone: ", "available: active, cron, name, timezone."),
        ("defaults:\n", "defaults:\n  image: x\n", "(line 3), defaults: image: ", "no such field"),
        ("flow: reconcile", "flow: reconsile", "(line 19), default: ", "no flow 'reconsile'; available: branch, "),
        ("name: default\n    flow", "flow", "(line 18), deployment 2: ", "name: must be given"),
        ("name: big\n", "name: Big One\n", "(line 7), Big One: name: ", "lower case letters, digits and '-'"),
        ("0 2 * * *", "0 25 * * *", "(line 15), big: ", "cron: must be five fields such as 0 2 * * 1-5"),
        ("0 2 * * *", "* * * * * *", "(line 15), big: ", "cron: must have five fields"),
        ("0 2 * * *", "0 2 30 2 *", "(line 15), big: ", "must name a date that exists"),
        ("Europe/Berlin", "Berlin", "(line 15), big: ", "an IANA time zone such as Europe/Berlin, not 'Berlin'"),
        (", name: weekend", "", "(line 16), big: ", "schedule 2 has the name 'default' of another one"),
        ("corpus: birds", "corpus: brids", "(line 17), big: request: ", "no corpus 'brids'"),
        ("recipe: digits", "recipe: digit", "(line 17), big: request: recipe: must be ", "not 'digit'"),
        ("recipe: digits", "recipes: digits", "(line 17), big: request: recipes: ", "Did you mean 'recipe'?"),
        ("recipe: digits", "overrides: {nights.night: now}", "(line 17), big: ", "Leave it out of a deployment with"),
        ("concurrency: 2", "concurrency: 0", "(line 13), big: concurrency: ", "must be at least 1, not 0"),
        ("deployments:\n", "deployments:\n  - big\n", "(line 7), deployment 1: ", "must be an object of fields"),
        ("project: birds", "project: fish", "(line 1): ", "for the project 'fish', but VITLINE_PROJECT names 'birds' here"),
        ('cron: "*/15 * * * *"', "cron: */15 * * * *", "(line 20) is not valid", "put text that begins with * in quotes"),
        ("    concurrency: 2\n", "    concurrency: 2\n    pool: a100\n", "(line 14) ", "'pool' stands twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(read, wrong, right, place, says):
    assert TWO.count(wrong) == 1, "the test changes one place"
    with pytest.raises(ValueError, match="deployments") as refused:
        read(TWO.replace(wrong, right))
    (line,) = str(refused.value).splitlines()
    assert f"deployments.yaml {place}" in line
    assert says in line
    assert len(line) < 450 or "available" in line or "must be '" in line


SERIES = """\
deployments:
  - {name: a, flow: pretrain-then-transfer, schedules: [{cron: "0 2 * * *"}], request: {corpus: birds, tasks: [city], recipe: digits}}
  - {name: b, flow: pretrain-then-transfer, schedules: [{cron: "0 3 * * *"}], request: {corpus: birds, tasks: [city], recipe: digits}}
  - {name: a, flow: pretrain-then-transfer}
"""


def test_two_deployments_of_one_name_or_series_are_refused(read):
    with pytest.raises(ValueError, match="series") as refused:
        read(SERIES)
    series, name = str(refused.value).splitlines()
    assert "(line 3), b: its nights would be of the same series 'icons' as those of" in series
    assert series.endswith("(line 2), a. Set `name: b` in its request.")
    assert "(line 4), a: pretrain-then-transfer/a is in " in name
    apart = SERIES.replace("request: {", "request: {name: a, ", 1).replace(
        "  - {name: a, flow: pretrain-then-transfer}\n", ""
    )
    assert [deployment.name for deployment in read(apart)] == ["a", "b"]


def test_a_form_that_people_fill_in_needs_no_values(read):
    """Unless a schedule starts it: then it must be whole."""
    (form,) = read("deployments: [{name: ours, flow: pretrain}]")
    assert form.request == {}
    with pytest.raises(ValueError, match="request: corpus: must be given"):
        read("deployments: [{name: ours, flow: pretrain, schedules: [{cron: 0 2 * * *}]}]")


def test_the_example_of_the_guide_is_read(read):
    (example,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    deployments = {deployment.full_name: deployment for deployment in read(example)}
    nightly = deployments["pretrain-then-transfer/birds-nightly-b16"]
    assert [schedule.active for schedule in nightly.schedules] == [None, False]
    assert {deployment.flow for deployment in deployments.values()} > {"reconcile", "collect-garbage"}


def test_housekeeping_that_nothing_starts_is_named_with_lines_for_the_file(read):
    forms = "deployments:\n  - {name: ours, flow: pretrain}\n"
    lines = beside_lines("d.yaml", read(forms), {"reconcile/default": False})
    assert lines[0].startswith("not in d.yaml, and left as they are: reconcile/default. `prefect deployment delete")
    assert [line.partition(";")[0] for line in lines[1:]] == [
        "no schedule starts reconcile", "no schedule starts collect-garbage",
    ]  # fmt: skip
    entries = "".join(f"  {line.split('`')[1]}\n" for line in lines[1:])
    assert beside_lines("d.yaml", read(forms + entries), {}) == []
    assert beside_lines("d.yaml", read(forms), {"reconcile/default": True, "collect-garbage/default": True})[1:] == []
