"""Two workers skip and rewind as one that never saw the spike, also after a kill of one of them."""

import subprocess
import sys

import pytest

from vit.training.checkpoint import list_checkpoints

from .test_spike_guard_run import ACTIONS, assert_same_end, begin  # noqa: F401 - a fixture


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ACTIONS)
def test_two_workers_equal_two_that_never_saw_the_spike_also_after_a_kill(begin, tmp_path, action):  # noqa: F811
    def together(run, name, killed_at=0, left_out=""):
        command = [sys.executable, "-m", "tests.vit.training.planted"]
        args = ["2", str(tmp_path / name), run.uri, str(killed_at), left_out]
        ranks = [
            subprocess.Popen([*command, str(rank), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        return [(*rank.communicate(timeout=240), rank.returncode) for rank in ranks]

    steps = ACTIONS[action][1]
    run, reference = begin("planted", action), begin("never", action)
    whole = together(reference, "meet0", left_out=f"{steps[0]}-{steps[-1]}")
    assert [end[0] for end in whole] == ["finished\n"] * 2, whole
    killed = together(run, "meet1", killed_at=34)
    assert [end[2] for end in killed] == [1, -9], killed
    assert list_checkpoints(run)
    resumed = together(run, "meet2")
    assert [end[0] for end in resumed] == ["finished\n"] * 2, resumed
    assert_same_end(run, reference)
    (page,) = [key for key in run.list("spikes/") if key.endswith(".html")]
    assert run.read(page).count(b"data:image/png;base64") == 16
