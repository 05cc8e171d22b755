"""What a sender does with the entries of an outbox, with an MLflow that is none."""

import pytest

from vitline.flows.to_mlflow import outbox, send
from vitline.flows.to_mlflow.outbox import OutboxEntry
from vitline.infra.runs.lease import LeaseHolder, LeaseLost, acquire_lease
from vitline.infra.runs.run_state import write_state
from vitline.infra.storage import open_store


class FakeSender:
    """Stands for a `Sender` and its client of MLflow."""

    def __init__(self):
        self.sent, self.refused, self.away, self.pings, self.remembered = [], set(), False, 0, None
        self.tracking = self

    def ping(self):
        self.pings += 1
        if self.away:
            raise ConnectionRefusedError("connection refused")

    def send(self, entry):
        self.sent.append(entry.key)
        if self.away or entry.key in self.refused:
            raise ValueError("a bad name")
        return "sent"

    def forget_others(self, keys):
        self.remembered = keys


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setattr(send, "CONTENT_S", 0.0)
    monkeypatch.setattr(send, "SEGMENTS_S", 0.0)
    return FakeSender()


@pytest.fixture
def lease(root):
    store = open_store(root).child("leases/lease")
    return LeaseHolder(store, acquire_lease(store, "lease", job_state=lambda job: None, owner="test").attempt)


@pytest.fixture
def sending(root, lease, mlflow):
    return send.Sending(open_store(root), lease, lambda: mlflow, lambda: None)


@pytest.fixture
def put(root):
    """put(key, state): a run in this state, and its entry in the outbox."""

    def make(key, state):
        run = open_store(root).child(f"runs/{key}")
        run.write_json("config.json", {})
        write_state(run, state, 1)
        outbox.put(open_store(root), OutboxEntry("run", key))

    return make


def whys(root):
    store = open_store(root)
    return {entry.key: outbox.read(store, entry).why for entry in outbox.listed(store)}


def test_living_runs_come_first_then_what_was_put_last(root, sending, mlflow, put, monkeypatch):
    put("living", "running")
    assert sending.once() == send.LOOK_S
    assert whys(root) == {"living": ""}
    put("old", "finished")
    put("new", "finished")
    open_store(root).write_json("runs/living/attempts/a1.json", {})
    assert sending.once() == send.LOOK_S
    assert mlflow.sent == ["living", "living", "new", "old"]
    assert whys(root) == {"living": ""}
    sending.once()
    assert len(mlflow.sent) == 4  # nothing has changed
    assert mlflow.remembered == {"living"}
    put("next", "finished")
    monkeypatch.setattr(send, "PASS_S", -1.0)
    assert sending.once() == 0.0  # entries are left
    assert "next" in whys(root)


def test_a_server_that_is_away_costs_one_request_a_look(root, sending, mlflow, put):
    mlflow.away = True
    put("a", "finished")
    put("b", "running")
    assert sending.once() == send.AWAY_S
    assert (mlflow.pings, mlflow.sent) == (1, [])
    assert whys(root) == dict.fromkeys("ab", "ConnectionRefusedError: connection refused")
    mlflow.away = False
    sending.once()
    assert whys(root) == {"b": ""}
    mlflow.away = True
    put("b", "finished")
    assert sending.once() == send.AWAY_S
    assert (mlflow.pings, mlflow.sent) == (3, ["b", "a", "b"])  # it is asked only once a request has failed


def test_what_mlflow_refuses_is_tried_twice_and_holds_up_nothing(root, sending, mlflow, put, monkeypatch):
    monkeypatch.setattr(send, "CONTENT_S", 1000.0)
    put("a", "finished")
    put("bad", "finished")
    mlflow.refused = {"bad"}
    assert sending.once() == send.LOOK_S
    assert mlflow.sent == ["bad", "bad", "a"]
    assert whys(root) == {"bad": "ValueError: a bad name"}
    sending.once()
    assert mlflow.sent == ["bad", "bad", "a"]  # it is tried again later
    mlflow.refused = set()
    put("bad", "finished")
    sending.once()
    assert whys(root) == {}


def test_nothing_is_sent_of_another_version_or_without_the_lease(root, sending, lease, mlflow, put):
    put("a", "finished")
    store, path = open_store(root), "tracking/outbox/run/a.json"
    store.write_json(path, {**store.read_json(path), "version": "99"})
    sending.once()
    assert (mlflow.sent, whys(root)) == ([], {"a": None})
    put("a", "finished")
    lease.release()
    other = open_store(root).child("leases/lease")
    acquire_lease(other, "lease", job_state=lambda job: None, owner="another")
    with pytest.raises(LeaseLost):
        sending.once()
    assert mlflow.sent == []
