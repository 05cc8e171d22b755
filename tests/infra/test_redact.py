"""Secrets are not recorded: neither those in URIs nor those that an error quotes."""

import io
import logging

import pytest

from vitline.flows.forms.forms import PipelineRequest, PrepareRequest
from vitline.infra.redact import CleanFormatter, holds_credentials, redact
from vitline.infra.runs.run_state import read_state, write_reconciled_state, write_state
from vitline.infra.settings import secret_values
from vitline.infra.storage import open_store


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://key:pass@host/b and http://me@h:80/p", "s3://host/b and http://h:80/p"),
        ("https://h/o?X-Amz-Signature=abc&part=2", "https://h/o?X-Amz-Signature=***&part=2"),
        ("write to me@example.org about file:///a@b/c", "write to me@example.org about file:///a@b/c"),
        ("denied for hunter2hunter2!", "denied for ***!"),
        ("train/loss at step 7: 12 s", "train/loss at step 7: 12 s"),
    ],
)
def test_redact_removes_secrets_and_nothing_else(text, clean, monkeypatch):
    planted = {"PLANTED_SECRET": "hunter2hunter2", "RAY_AUTH_MODE": "token-of-mode", "X_TOKEN_PATH": "/a@b/c-and-more"}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    assert redact(text, secret_values()) == clean
    assert "token-of-mode" not in secret_values()


@pytest.mark.parametrize("uri", ["s3://AKIA:hunter2hunter2@bucket/x", "https://host/x?X-Amz-Signature=hunter2hunter2"])
def test_forms_refuse_uris_with_credentials(uri):
    assert holds_credentials(uri)
    for form, given in ((PrepareRequest, {"source": uri}), (PipelineRequest, {"tasks": [uri]})):
        with pytest.raises(ValueError, match="must be a URI without user, password or signature"):
            form.model_validate(given)
    for uri in ("s3://bucket/x", "file:///data/@eaDir", "/data/me@home/b", "birds/1a2b"):
        assert not holds_credentials(uri)
        assert PipelineRequest(corpus=uri).corpus == uri


def test_secrets_are_removed_from_stored_reasons_and_logged_errors(monkeypatch, root):
    monkeypatch.setenv("STORE_PASSWORD", "hunter2hunter2")
    run = open_store(root).child("runs/r")
    write_state(run, "failed", 1, reason="denied for hunter2hunter2")
    assert read_state(run)["reason"] == "denied for ***"
    write_reconciled_state(run, "failed", 2, "denied for hunter2hunter2 at s3://a:b@c")
    assert read_state(run)["reason"] == "denied for *** at s3://c"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(CleanFormatter("%(levelname)s %(message)s"))
    try:
        raise ValueError("hunter2hunter2")
    except ValueError as error:
        handler.emit(
            logging.LogRecord("x", 40, "p", 1, "it %s", ("hunter2hunter2",), (ValueError, error, error.__traceback__))
        )
    assert stream.getvalue().startswith("ERROR it ***")
    assert stream.getvalue().endswith("ValueError: ***\n")
