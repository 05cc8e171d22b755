"""What tests of stores share."""

import pytest


@pytest.fixture
def no_waits(monkeypatch):
    """Tries follow each other at once, nine at most."""
    from vitline.infra.stores import remote_store

    monkeypatch.setattr(remote_store.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(remote_store, "_PATIENCE_S", 0.0)
