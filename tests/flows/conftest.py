"""Fixtures: the console command, called in this process with the arguments of a shell; a run that has started; a published model."""

import sys
import uuid

import pytest

from vitline.flows.catalog.records import AttemptRecord, Origin
from vitline.flows.cli import main as cli
from vitline.infra.storage import open_store

from ..trainings import begin


@pytest.fixture
def vitline(monkeypatch, capsys):
    """vitline(*arguments): exit code, stdout and stderr of the command, run in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["vitline", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(vitline):
    """refused(*arguments): the error of a wrong command, after checking that it is one sentence."""

    def call(*arguments):
        code, out, err = vitline(*arguments)
        assert code == 2, err
        assert out == ""
        assert "Traceback" not in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert len(err) < 450
        return err

    return call


@pytest.fixture
def begin_run(train_config):
    """begin_run(root, name, origin, **execution): a training that has been claimed; its store, key and attempt."""

    def make(root, name=None, origin=None, attempt_at=1_700_000_000.0, **execution):
        # A unique name, because other tests keep their runs on the same server.
        run, lease = begin(train_config(name or f"t-{uuid.uuid4().hex[:8]}", **execution), root)
        record = AttemptRecord(
            run_key=lease.run_key,
            attempt=lease.attempt,
            job_id=lease.job_id,
            ray_address="http://127.0.0.1:8265",
            owner="ann@host:1",
            started_at=attempt_at + lease.attempt,
            origin=origin or Origin(),
        )
        run.write_json(f"attempts/a{lease.attempt}.json", record.model_dump(mode="json"))
        return run, lease.run_key, lease.attempt

    return make


@pytest.fixture
def tiny(tmp_path) -> str:
    """URI of a published network of 8 px."""
    from vitline.data_prep.decode import DecodePolicy
    from vitline.vit.input.config import AugmentConfig
    from vitline.vit.input.image_contract import ImageContract
    from vitline.vit.models.build import build_network
    from vitline.vit.models.config import ViTConfig
    from vitline.vit.published.models import publish

    network = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=16, depth=1, num_heads=2, mlp_dim=32)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=8))
    return publish(open_store(str(tmp_path)), "tiny", "1", build_network(network, 2), contract, ["a", "b"], {})
