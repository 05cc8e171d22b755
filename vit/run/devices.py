"""Chooses the devices of a training from the request and from what the cluster can ever have, not from what is up now."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from vitline.vit.config import ExecutionConfig, PlacementConfig

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


class Node(NamedTuple):
    """A node of the cluster, with its resources (all of them, or the free ones) and labels."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]


class Workers(NamedTuple):
    """The workers of a training on a cluster."""

    devices: Devices
    resources: Mapping[str, float]
    """What each reserves of its node, by Ray's names."""
    where: str
    """What each needs beside its GPU or its one CPU, as in ` with 8 CPUs each on H100 nodes with pool=training`; else nothing."""
    labels: Mapping[str, str]
    """Those of the nodes that they may run on."""
    room: int
    """For how many the nodes that are up have room, busy or not."""


def choose_workers(
    execution: ExecutionConfig,
    nodes: Sequence[Node],
    declared: Mapping[str, float] | None,
    *,
    one_node: bool,
    free: Sequence[Node] = (),
) -> Workers:
    """The workers of a training on a cluster of these nodes. `free`: the same nodes with their free resources.

    `declared`: what the cluster's autoscaler may start; None where there is none. It says nothing of labels and types of GPUs, so a
    training that asks for these may wait for them. Raises ValueError for what the cluster can never have.
    """
    placement = execution.placement
    chosen_nodes = placement.node_labels or placement.accelerator_type or placement.one_domain
    reserved = {gpu: worker_resources(execution, use_gpu=gpu, one_node=one_node) for gpu in (True, False)}
    labels = {gpu: node_labels(execution, nodes, free, reserved[gpu]) for gpu in (True, False)}
    room = {gpu: places(nodes, reserved[gpu], labels[gpu]) for gpu in (True, False)}
    if one_node and chosen_nodes and not any(room.values()):
        raise ValueError(
            f"execution.placement asks for workers{placement_text(placement, labels[False])}, but the one node of this Ray is not such a "
            "node. Leave placement out here, or set RAY_ADDRESS to a cluster that has such nodes."
        )
    known = None if chosen_nodes else declared
    most = {gpu: cluster_limit("GPU" if gpu else "CPU", one_node, room[gpu], known) for gpu in (True, False)}
    asked: Asked = "cuda" if placement.accelerator_type else execution.device
    devices = choose_devices(asked, execution.num_workers, room[True], most[True], execution.min_workers, most[False])
    gpu = devices.use_gpu
    cpus = reserved[gpu].get("CPU", 0)
    with_cpus = f" with {cpus:g} CPUs each" if cpus > 1 else ""
    where = with_cpus + placement_text(placement, labels[gpu])
    return Workers(devices, reserved[gpu], where, labels[gpu], room[gpu])


def node_labels(
    execution: ExecutionConfig, nodes: Sequence[Node], free: Sequence[Node], worker: Mapping[str, float]
) -> Mapping[str, str]:
    """The labels of the nodes that workers with these resources may run on. Raises ValueError if no node has the label of `one_domain`."""
    placement, name = execution.placement, execution.placement.one_domain
    if name is None:
        return placement.node_labels
    values = {
        node.labels[name]
        for node in nodes
        if name in node.labels and placement.node_labels.items() <= node.labels.items()
    }
    if not values:
        known = ", ".join(sorted({label for node in nodes for label in node.labels})) or "none"
        where = placement_text(placement, placement.node_labels)
        raise ValueError(
            f"execution.placement.one_domain={name!r} is a label that no node of this cluster{where} has; there are {known}. Start nodes "
            f"with it (`ray start --labels {name}=...`), or leave one_domain out."
        )

    def suits(value: str) -> tuple[bool, int]:
        within = {**placement.node_labels, name: value}
        found = places(free, worker, within)
        return (True, -found) if found >= execution.num_workers else (False, places(nodes, worker, within))

    return {**placement.node_labels, name: max(sorted(values), key=suits)}


def worker_resources(execution: ExecutionConfig, *, use_gpu: bool, one_node: bool) -> dict[str, float]:
    """What each worker of a training reserves of its node, by Ray's names."""
    placement = execution.placement
    cpus = placement.cpus_per_worker
    if cpus is None:
        cpus = 0 if one_node else execution.decode_threads
    reserved: dict[str, float] = {"GPU": 1, "CPU": cpus} if use_gpu else {"CPU": max(cpus, 1)}
    if placement.accelerator_type:
        reserved[f"accelerator_type:{placement.accelerator_type}"] = (
            0.001  # of the one that such a node has, as Ray does
        )
    return {kind: number for kind, number in reserved.items() if number}


def places(nodes: Iterable[Node], worker: Mapping[str, float], labels: Mapping[str, str]) -> int:
    """The number of workers for which nodes with these labels have room."""
    return sum(
        min(int(node.resources.get(kind, 0) // number) for kind, number in worker.items())
        for node in nodes
        if labels.items() <= node.labels.items()
    )


def placement_text(placement: PlacementConfig, labels: Mapping[str, str]) -> str:
    """` on H100 nodes with pool=training`; nothing where any node will do."""
    pairs = ", ".join(f"{name}={value}" for name, value in labels.items())
    kind = f" {placement.accelerator_type}" if placement.accelerator_type else ""
    return f" on{kind} nodes" + (f" with {pairs}" if pairs else "") if kind or pairs else ""


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
