"""Two processes on the CPU have the losses of one, resume bit for bit, end together, name the slow one, and give no
other warning."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitline.vit.training.world import World

from .train_together import LAYERED, MUON, end_by_bad_examples, losses

WORKER = Path(__file__).with_name("train_together.py")


@pytest.mark.slow
def test_two_workers_have_the_losses_and_the_end_of_one_and_resume_bit_for_bit_without_warnings(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=800) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    whole, resumed, layered, layered_resumed, muon, muon_resumed, end, *slow = json.loads(answers[0][0])
    assert (resumed, layered_resumed, muon_resumed) == (whole, layered, muon)
    # Muon computes in bfloat16, in which differences of gradients by rounding grow.
    assert muon == pytest.approx(losses(World(), recipe=MUON), rel=1e-2)
    assert layered == pytest.approx(losses(World(), recipe=LAYERED), rel=1e-3)
    alone = losses(World())
    assert whole[0] == pytest.approx(alone[0], rel=1e-5)
    assert whole == pytest.approx(alone, rel=1e-3)
    assert end == end_by_bad_examples(World())
    assert end[:2] == ["failed", 11]
    assert "row 0: corrupt; shard, row 1: corrupt; shard, row 2: corrupt. " in end[2]
    for comparisons in slow:
        assert [rank for rank, _ in comparisons] == [1, 1, 1]
        assert all(fraction > 0.2 for _, fraction in comparisons)
    warnings = [line for line in answers[0][1].splitlines() if "wait" in line]
    assert len(warnings) == 2, answers  # once for each training
    assert all(re.search(r"the other ranks wait \d+ % of the time for rank 1 on ", line) for line in warnings)
    assert "the other ranks wait" not in answers[1][1]
    # Torch's C++ code warns on stderr, past Python's warning filters.
    assert not any("find_unused_parameters" in err for _, err in answers), answers
