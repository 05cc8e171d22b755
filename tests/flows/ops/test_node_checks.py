"""What the doctor finds out about the nodes of a Ray cluster: its judgement of answers, and real nodes, one of which is frozen."""

import json
import pickle
import platform
import sys

import psutil
import pytest

from vitline.flows.ops import node_checks, service_checks
from vitline.flows.ops.check import Check
from vitline.flows.ops.node_checks import Node, NodeAnswer, judge
from vitline.infra.runs.ray_work import _results
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

from ...servers.ray_nodes import three_nodes

OTHER = "python on h2 runs python 3.12 (submitted from python 3.11). Install the same versions there, or ..."


def node(number, *checks, gpus=0, torch=True, **changes):
    """A node that answers, or has a `problem`."""
    seen = {"name": f"h{number}", "gpus": gpus} | changes
    answer = NodeAnswer(began_at=0, took_s=1, has_torch=torch, facts="16 CPUs", checks=checks)
    return Node(**seen) if "problem" in seen else Node(**seen, answer=answer)


def judged(*nodes):
    """The findings after the line of facts: (mark, text, advice)."""
    checks = judge(nodes)
    assert {check.name for check in checks} == {"nodes"}
    return [(check.mark, check.found, check.advice) for check in checks if not check.found.endswith(": 16 CPUs")]


def test_nodes_that_say_the_same_share_a_line():
    assert judge([node(i) for i in range(1, 6)]) == [Check("nodes", True, "h1, h2, h3 and 2 more: 16 CPUs")]


@pytest.mark.parametrize(
    ("problem", "step"),
    [
        (OTHER, "requirements.lock"),
        ("ModuleNotFoundError: No module named 'vitline'", "requirements.lock"),
        ("no answer within 30 s", "raylet.out"),
    ],
)
def test_a_node_without_an_answer_is_a_failure_with_its_reason_and_the_others_are_reported(problem, step):
    ((mark, found, advice),) = judged(node(1), node(2, problem=problem), node(3))
    assert (mark, found, step in advice) == ("FAIL", f"h2: {problem}", True)


def test_another_python_on_a_node_is_such_an_answer(monkeypatch):
    monkeypatch.setenv("VITLINE_SUBMITTED_FROM", json.dumps({"python": "3.99"}))
    ((_, error),) = _results(pickle.dumps(print), pickle.dumps(None), "task", None)
    assert f"on {platform.node()} runs python 3." in str(error)
    ((*_, advice),) = judged(node(1, problem=str(error)))
    assert "requirements.lock" in advice


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(8, []), (0, [("WARN", "h2: no torch: this node only prepares data", "node_labels")])],
)
def test_a_node_without_torch_matters_where_trainings_on_cpus_may_come(gpus, expected):
    found = judged(node(1, gpus=gpus), node(2, torch=False))
    assert [(mark, text) for mark, text, _ in found] == [each[:2] for each in expected]
    assert all(end in advice for (*_, advice), (*_, end) in zip(found, expected, strict=True))


@pytest.mark.parametrize(("ahead_s", "says"), [(40, "40 s or more ahead of"), (-40, "40 s or more behind")])
def test_a_wrong_clock_of_a_node(ahead_s, says):
    assert judged(node(1, ahead_s=ahead_s / 10)) == []
    ((mark, found, advice),) = judged(node(1, ahead_s=ahead_s))
    assert (mark, says in found, "NTP" in advice) == ("FAIL", True, True)


def test_what_fails_on_several_nodes_is_one_line_with_the_advice_of_the_check():
    refused, full = (
        Check("store", False, "cannot list: 403", "grant"),
        Check("shard cache", True, "0.1 GB free", "Free"),
    )
    assert judged(node(1, refused), node(2, full, refused), node(3, Check("disk", True, "over 10 GB"))) == [
        ("FAIL", "h1, h2: store: cannot list: 403", "grant"),
        ("WARN", "h2: shard cache: 0.1 GB free", "Free"),
    ]


def test_a_store_that_is_not_the_same_on_a_node_is_named(tmp_path):
    settings = Settings(root=str(tmp_path / "store"))
    open_store(settings.root).write("doctor/here", b"vitline")
    assert service_checks.check_store_of_all(settings, "doctor/here").found.startswith("the same as")
    other = service_checks.check_store_of_all(Settings(root=str(tmp_path / "other")), "doctor/here")
    assert (other.ok, "does not hold" in other.found, "a folder that they share" in other.advice) == (False, True, True)


def test_a_full_disk_and_certificates_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    absent = service_checks.check_certificates()
    assert (absent.ok, f"is not there: AWS_CA_BUNDLE={tmp_path}/ca.pem" in absent.found) == (False, True)
    (tmp_path / "ca.pem").touch()
    assert "HTTPS_PROXY=http://proxy:3128" in service_checks.check_certificates().found
    assert node_checks.check_free("disk", str(tmp_path), needed=True).mark == "ok"
    monkeypatch.setattr(node_checks, "MIN_FREE_BYTES", 10**18)
    marks = [node_checks.check_free("any", str(tmp_path / "absent"), needed=needed).mark for needed in (True, False)]
    assert marks == ["FAIL", "WARN"]


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.timeout(900)
def test_each_node_of_a_real_cluster_answers_and_a_frozen_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    with three_nodes(Settings(root=str(tmp_path)), tmp_path / "logs") as cluster:
        settings = cluster.of_client(str(tmp_path / "store"))
        ran, *lines = node_checks.check_cluster(settings, str(tmp_path / "cache"))
        assert (ran.ok, len(lines), ran.found.endswith(f"a small job ran in {sys.executable}")) == (True, 1, True), ran
        assert (lines[0].mark, lines[0].found.count(", node ")) == ("ok", 3)
        for said in (
            "python 3.",
            "torch ",
            "store: the same as",
            "GB free at /tmp",
            "shard cache: over",
            "decoder: ",
        ):
            assert said in lines[0].found
        assert open_store(settings.root).list("doctor") == []
        frozen = psutil.Process(cluster.nodes[1].pid)
        for process in (frozen, *frozen.children(recursive=True)):
            process.suspend()
        monkeypatch.setattr(node_checks, "_JOB", f"{SHORT}; {node_checks._JOB}")
        # It is silent, or Ray has noticed its death meanwhile. On a busy machine a second node may be late.
        _, answered, *others = node_checks.check_cluster(settings)
        assert (answered.ok, {(each.ok, "raylet.out" in each.advice) for each in others}) == (True, {(False, True)}), (
            others
        )
        assert sum(each.found.count(", node ") for each in (answered, *others)) == 3


SHORT = "from vitline.flows.ops import node_checks; node_checks.NODE_S = 12.0"
"""The driver waits for less."""
