"""On which devices a training runs: from what was asked for and what the cluster can ever have, not from what lives now."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Asked = Literal["auto", "cuda", "cpu"]


class Devices(NamedTuple):
    """Workers of a training, each with a GPU or a CPU of its own; `why` is for the log."""

    use_gpu: bool
    num_workers: int
    why: str

    @property
    def told(self) -> str:
        """`2 GPUs`, or `1 CPU worker`."""
        return devices_text("cuda" if self.use_gpu else "cpu", self.num_workers)


def devices_text(device: str, number: int) -> str:
    return f"{number} {'CPU worker' if device == 'cpu' else 'GPU'}{'s' if number > 1 else ''}"


def choose_devices(asked: Asked, num_workers: int, alive: float, most: float | None) -> Devices:
    """Where `num_workers` train on a cluster of which `alive` GPUs live and that can have at most `most` (None: nobody
    knows, as no autoscaler has told Ray).

    `auto` takes GPUs where any lives or can come, else CPUs. Where fewer GPUs can ever come than workers are asked for,
    `auto` trains on those; what `cuda` asks for is taken as asked, and raises ValueError where it can never be had.
    """
    if asked == "cpu":
        return Devices(False, num_workers, "execution.device=cpu")
    reachable = alive if most is None else max(alive, most)
    if asked == "cuda":
        if most is not None and reachable < num_workers:
            raise ValueError(
                f"execution.device=cuda with execution.num_workers={num_workers} asks for {num_workers} GPUs, but this cluster "
                f"can have at most {reachable:g}. Set execution.num_workers to that, or execution.device=cpu."
            )
        return Devices(True, num_workers, "execution.device=cuda")
    if not reachable:
        known = "none can come" if most is not None else "no autoscaler says that one can come"
        return Devices(False, num_workers, f"the cluster has no GPU and {known}; execution.device=cuda waits for GPUs")
    if most is not None and reachable < num_workers:
        # The numbers do not depend on W, only the time does.
        return Devices(True, int(reachable), f"the cluster can have {reachable:g} GPUs for {num_workers} workers")
    return Devices(True, num_workers, f"{alive:g} GPUs live" + ("" if most is None else f", at most {most:g} can"))


def most_gpus(one_node: bool, alive: float, declared: Mapping[str, float] | None) -> float | None:
    """The most GPUs that a cluster can have: those alive on a Ray of one machine, what the node types of its autoscaler add
    up to; None where neither is known."""
    if one_node:
        return alive
    return None if declared is None else float(declared.get("GPU", 0))
