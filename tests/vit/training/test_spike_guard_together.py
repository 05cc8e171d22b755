"""Two workers skip and rewind as two that never saw the spike, also after a kill of one of them."""

import multiprocessing

import pytest

from . import planted
from .test_spike_guard_run import ACTIONS, assert_same_end, begin  # noqa: F401 - a fixture


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ACTIONS)
def test_two_workers_equal_two_that_never_saw_the_spike_also_after_a_kill(begin, tmp_path, action):  # noqa: F811
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitline.vit.run.training_run"])  # imported once for the six processes

    def together(run, name, killed_at=0, left_out=range(0)):
        args = (2, str(tmp_path / name), run.uri, killed_at, left_out)
        ranks = [context.Process(target=planted.train_together, args=(rank, *args)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return [rank.exitcode for rank in ranks]

    run, reference = begin("planted", action), begin("never", action)
    assert together(reference, "meet0", left_out=ACTIONS[action][1]) == [0, 0]
    assert together(run, "meet1", killed_at=34) == [1, -9]
    assert together(run, "meet2") == [0, 0]
    assert_same_end(run, reference)
    (page,) = [key for key in run.list("spikes/") if key.endswith(".html")]
    assert run.read(page).count(b"data:image/png;base64") == 16
