"""A branch on a real Ray with two workers: what it equals, and a kill of its driver and workers."""

import contextlib
import threading
import time

import psutil
import pytest

from vitline.flows.forms.forms import BranchRequest
from vitline.flows.forms.training_config import resolve_branch
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import open_services
from vitline.flows.runs.stage import StageFailed, run_store
from vitline.infra.config import replace
from vitline.infra.runs.run_state import read_state
from vitline.infra.settings import Settings
from vitline.vit.checkpoints.names import FOLDER, checkpoint_steps, find_checkpoints
from vitline.vit.run.resolved import resolve

from ...trainings import losses_of

pytestmark = [pytest.mark.long, pytest.mark.servers, pytest.mark.timeout(1800)]


def test_a_branch_of_two_workers_survives_a_kill_and_the_loss_of_its_parents_checkpoints(
    root, tmp_path, train_config, processes
):
    config = train_config("parent", workers=2, steps=60, save_every_steps=10, keep_checkpoints=6)
    size = {"embed_dim": 128, "depth": 6, "num_heads": 4, "mlp_dim": 512}
    config = replace(config, **{f"recipe.model.{name}": value for name, value in size.items()})
    with open_services(Settings(root=root, home=tmp_path)) as services:
        spec, _ = train_model(resolve(config, root), services)
        parent = run_store(root, spec.run_key)
        branch = resolve_branch(root, BranchRequest(parent=spec.run_key, step=20))
        run = run_store(root, branch.spec().run_key)
        ended, unpinned = threading.Event(), list[float]()

        def kill_at_the_first_checkpoint():
            while not ended.wait(0.05):  # often: a quiet machine trains the 40 steps of the branch in two seconds
                started, pins = read_state(run), find_checkpoints(parent.list(FOLDER)).pins
                if checkpoint_steps(run):
                    for process in processes("vitline.vit.ray_jobs.train_driver", run.uri):
                        for each in [process, *process.children(recursive=True)]:
                            with contextlib.suppress(psutil.NoSuchProcess):
                                each.kill()
                    return
                if started and not pins:
                    unpinned.append(time.time())

        killer = threading.Thread(target=kill_at_the_first_checkpoint)
        killer.start()
        try:
            with pytest.raises(StageFailed, match="ended without a result"):
                train_model(branch, services)
        finally:
            ended.set()
            killer.join()
        assert not unpinned, "the checkpoint is pinned until the branch has one"
        for key in parent.list(FOLDER):
            parent.delete(key)
        train_model(branch, services)
    assert read_state(run)["state"] == "finished"
    assert read_state(run)["attempt"] == 2
    assert losses_of(run) == {step: loss for step, loss in losses_of(parent).items() if step > 20}
