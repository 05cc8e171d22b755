"""Metrics of a training reach its journal, whatever the machine's own disk does (docs/design.md, "Journal")."""

import tempfile
import uuid

from infra.runs.journal import read_journal
from infra.storage import open_store
from vit.training.reporter import Reporter


def test_full_local_disk_stops_no_training_and_loses_no_metric(tmp_path, monkeypatch, full_disk):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = open_store(f"memory://{uuid.uuid4().hex}")
    with Reporter(run, 1, total_steps=4, active=True) as reporter:
        reporter.record(1, {"optim/lr": 0.1})
        with full_disk(150):
            reporter.record(2, {"optim/lr": 0.2})
            reporter.seal()
            reporter.record(3, {"optim/lr": 0.3})
        reporter.record(4, {"optim/lr": 0.4})
    assert [(record.step, record.value) for record in read_journal(run)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
