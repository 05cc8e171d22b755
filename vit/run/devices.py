"""Chooses the devices of a training from the request and from what the cluster can ever have, not from what is up now."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Asked = Literal["auto", "cuda", "cpu"]


class Devices(NamedTuple):
    """The workers of a training, each with one GPU or one CPU; `why` is the reason for the log."""

    use_gpu: bool
    num_workers: int
    why: str

    @property
    def text(self) -> str:
        """`2 GPUs`, or `1 CPU worker`."""
        return devices_text("cuda" if self.use_gpu else "cpu", self.num_workers)


def devices_text(device: str, number: int) -> str:
    return f"{number} {'CPU worker' if device == 'cpu' else 'GPU'}{'s' if number > 1 else ''}"


def choose_devices(
    asked: Asked,
    num_workers: int,
    alive: float,
    most: float | None,
    min_workers: int | None = None,
    most_cpus: float | None = None,
) -> Devices:
    """The devices of `num_workers` on a cluster with `alive` GPUs now, and `most` GPUs and `most_cpus` CPUs at most.

    They are None where no autoscaler has declared its limits to Ray. `min_workers`: so few will do, too. `auto` takes GPUs if
    any are up or can be added, else CPUs; if the cluster can never have as many as workers, it uses as many workers as there can
    be: their number changes how long the training takes, not its result. `cuda` and `cpu` take exactly the requested number and
    raise ValueError if the cluster can never have it, or not even `min_workers`.
    """
    reachable = alive if most is None else max(alive, most)
    fewest, setting = min_workers or num_workers, "num_workers" if min_workers is None else "min_workers"
    if asked == "cuda":
        if most is not None and reachable < fewest:
            raise ValueError(
                f"execution.device=cuda with execution.{setting}={fewest} needs {fewest} GPUs, but this "
                f"cluster can have at most {reachable:g}. Lower execution.{setting}, or set execution.device=cpu."
            )
        number = num_workers if most is None else min(num_workers, int(reachable))
        return Devices(True, number, "execution.device=cuda")
    if asked == "cpu":
        if most_cpus is not None and most_cpus < fewest:
            raise ValueError(
                f"execution.device=cpu with execution.{setting}={fewest} needs {fewest} CPUs, but this "
                f"cluster can have at most {most_cpus:g}. Lower execution.{setting}."
            )
        return Devices(False, _at_most(num_workers, most_cpus), "execution.device=cpu")
    if not reachable:
        known = "can get none" if most is not None else "no autoscaler declares any"
        number = _at_most(num_workers, most_cpus)
        cpus = f", and {number} CPUs for {num_workers} workers" if number < num_workers else ""
        return Devices(
            False, number, f"the cluster has no GPU and {known}{cpus}; set execution.device=cuda to wait for GPUs"
        )
    if most is not None and reachable < num_workers:
        return Devices(True, int(reachable), f"the cluster can have {reachable:g} GPUs for {num_workers} workers")
    limit = "" if most is None else f", at most {most:g}"
    return Devices(True, num_workers, f"the cluster has {alive:g} GPUs now{limit}")


def _at_most(number: int, most: float | None) -> int:
    return number if most is None else max(1, min(number, int(most)))


def cluster_limit(kind: str, one_node: bool, alive: float, declared: Mapping[str, float] | None) -> float | None:
    """The most GPUs, or CPUs, that a cluster can have; None if unknown.

    A one-node Ray has those that are up. Otherwise it is the sum over the node types that its autoscaler declares.
    """
    if one_node:
        return alive
    return None if declared is None else float(declared.get(kind, 0))
