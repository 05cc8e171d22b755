"""Four processes on the CPU that split a network have the losses of four that hold it whole, and take over each other's checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vitline.infra.storage import open_store
from vitline.vit.checkpoints.manifest import open_checkpoint
from vitline.vit.checkpoints.names import list_checkpoints
from vitline.vit.checkpoints.restore import resume
from vitline.vit.config import ExecutionConfig
from vitline.vit.published.models import content_digest
from vitline.vit.training.loop import initial_state
from vitline.vit.training.sharding.fsdp import machines_of, shard
from vitline.vit.training.world import World

from .sharding_together import AVERAGED, META
from .train_together import NUM_CLASSES

WORKER = Path(__file__).with_name("sharding_together.py")
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_four_workers_split_a_network_and_change_how_by_checkpoints(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{WORKER.stem}", str(rank), "4", str(tmp_path / "meet"), str(tmp_path / "run")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    answers = [process.communicate(timeout=800) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, answers
    told, held = zip(*(json.loads(out)[:2] for out, _ in answers), strict=True)
    assert all(other == told[0] for other in told)
    whole = told[0]["none"]
    # Sums over ranks are formed in another order, and each step repeats the rounding of the last.
    assert told[0]["fsdp"] == pytest.approx(whole, rel=1e-6)
    assert told[0]["hsdp"] == pytest.approx(whole, rel=1e-6)
    numbers = held[0]["none"]
    assert sum(of_rank["fsdp"] for of_rank in held) == numbers
    assert sum(of_rank["hsdp"] for of_rank in held) == 2 * numbers
    assert max(of_rank["fsdp"] for of_rank in held) < 0.3 * numbers

    changed, digests = json.loads(answers[0][0])[2]
    assert changed == pytest.approx(whole, rel=1e-6)
    backs, masked, layered = zip(*(json.loads(out)[3:] for out, _ in answers), strict=True)
    assert masked[0][1] == pytest.approx(masked[0][0], rel=1e-6)
    for split in layered[0][1:]:
        assert split == pytest.approx(layered[0][0], rel=1e-6)

    # Back to step 4, which takes the later checkpoints with it. It was saved by as many workers: each reads its own slices.
    run = open_store(str(tmp_path / "run"))
    (kept,) = list_checkpoints(run)
    assert {(step, digest) for step, digest, _ in backs} == {(4, digests["4"])}
    pieces = open_checkpoint(run, kept).pieces
    assert any(piece["offsets"][0] for piece in pieces if piece["shape"])
    of_run = sum(piece["end"] - piece["start"] for piece in pieces)
    assert max(num_bytes for *_, num_bytes in backs) < 0.3 * of_run <= 0.3 * sum(num_bytes for *_, num_bytes in backs)
    alone = initial_state(AVERAGED, NUM_CLASSES, World().device)
    assert resume(run, alone, META, World()).prefix == kept
    assert content_digest(alone.evaluation_model().state_dict()) == digests["4"]


class Machines(World):
    """A world whose ranks are on these machines."""

    where = ("0", "0", "1")

    def gather(self, text):
        return list(self.where)


def test_hsdp_needs_equally_many_workers_on_each_machine(monkeypatch):
    with pytest.raises(ValueError, match=r"equally many workers; here they have \[2, 1\]"):
        machines_of(Machines(0, 3))
    monkeypatch.setattr(Machines, "where", ("0", "1", "0", "1"))
    with pytest.raises(ValueError, match="equally many workers"):
        machines_of(Machines(0, 4))
    monkeypatch.setattr(Machines, "where", ("0", "0", "1", "1"))
    assert machines_of(Machines(0, 4)) == 2


def test_one_worker_holds_its_network_whole():
    model = initial_state(AVERAGED, NUM_CLASSES, World().device).model
    before = type(model)
    shard(model, ExecutionConfig(sharding="fsdp"), World())
    assert type(model) is before
