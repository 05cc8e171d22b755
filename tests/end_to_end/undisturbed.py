"""A training in plain processes, without a server or a cluster that could be killed: what killed ones must be equal to.

    python undisturbed.py RUN RANK WORKERS FILE

is one of its processes."""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist

from vitline.infra.config import replace
from vitline.infra.runs.lease import acquire_lease
from vitline.infra.storage import Store, open_store
from vitline.vit.run.run_spec import RunSpec
from vitline.vit.run.training_run import TrainingRun
from vitline.vit.training.world import World


def train_undisturbed(spec: RunSpec, root: str) -> Store:
    """Trains as `spec` says, with as many workers, to the end; the run, which is below `root`."""
    run = open_store(root).child(f"runs/{spec.run_key}")
    run.write_json("config.json", replace(spec, models=open_store(root).uri_of("models")).model_dump(mode="json"))
    acquire_lease(run, spec.run_key, job_state=lambda job: None, owner="test")
    workers = spec.config.execution.num_workers
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, run.uri]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(workers), f"{folder}/meeting"], stderr=subprocess.PIPE, text=True
            )
            for rank in range(workers)
        ]
        for rank in ranks:
            _, errors = rank.communicate()
            assert rank.returncode == 0, errors
    return run


if __name__ == "__main__":
    uri, rank, workers, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)  # as in a worker that has one CPU
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=workers)
    assert TrainingRun(open_store(uri), 1, World(rank, workers)).execute() == "finished"
    dist.destroy_process_group()
    # Not every thread of gloo ends before Python does (`train_together.py`).
    sys.stderr.flush()
    os._exit(0)
