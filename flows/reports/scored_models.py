"""Facts about a scored model: its network, its pre-training data, and the cost of its training."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vitline.flows.catalog.stored_configs import RunFile
from vitline.infra.records import UnreadableRecord
from vitline.infra.runs.journal import read_journal
from vitline.infra.runs.run_state import read_state
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.reference.published_checks import architecture_of, data_of_corpus, data_of_weights
from vitline.vit.models.flops import training_flops
from vitline.vit.published.model_record import model_record, network_of
from vitline.vit.run.run_spec import read_starts

log = logging.getLogger(__name__)

DAY_S = 86_400
CHAIN = 8
"""How many models are followed back, where each was fine-tuned from the one before."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, including the models that it was fine-tuned from; None for what is not known."""

    architecture: str | None = None
    """As the paper spells it; None for a network that has no named size."""
    data: str | None = None
    """The public data set of pre-training."""
    image_size_px: int | None = None
    weights: str | None = None
    """The file or folder of published weights that the model was converted from."""
    exaflops: float | None = None
    """All training: 6 x multiply-adds of a forward pass x images seen (arXiv:2010.11929, Table 6)."""
    device_days: float | None = None
    """Devices times days of all training: GPUs, or worker processes if there are none."""


def model_facts(root: str, model: str | None, depth: int = CHAIN) -> ModelFacts:
    """Facts from the config of a published model, and from the runs and corpora that it names."""
    config = model_record(model) if model and depth else None
    if model is None or config is None:
        return ModelFacts()
    try:
        network, provenance = network_of(open_store(model), config), config.get("provenance", {})
    except UnreadableRecord as odd:  # its scores are shown all the same
        log.warning("%s", odd)
        return ModelFacts()
    seen = provenance.get("images_seen")
    own_flops = training_flops(network, config["num_classes"]) * seen / 1e18 if seen else None
    weights, data, own_days, origin = provenance.get("converted_from"), None, None, None
    if weights:
        data = data_of_weights(weights)
    elif key := provenance.get("run_key"):
        run = open_store(root).child(f"runs/{key}")
        spec: RunFile | None = run.read_json_or_none("config.json")
        own_days = device_days(run)
        training = spec["config"] if spec and "config" in spec else None
        if training and (init := training.get("init_model")):
            origin = model_facts(root, init, depth - 1)
            data = origin.data
        elif training and (corpus := training.get("corpus")) and not training.get("mixture"):
            data = _data_of(open_store(corpus).read_json_or_none("manifest.json") or {})
    elif init := provenance.get("init_model"):  # of a final trial, whose network was kept
        origin = model_facts(root, init, depth - 1)
        data = origin.data
    return ModelFacts(
        architecture=architecture_of(network),
        data=data,
        image_size_px=network.image_size_px,
        weights=weights,
        exaflops=_sum(own_flops, origin.exaflops if origin else 0.0),
        device_days=_sum(own_days, origin.device_days if origin else 0.0),
    )


def device_days(run: Store) -> float | None:
    """Devices times days of a training; None if its starts were not recorded.

    The time between the last record of a start and the next start is not counted, because nothing ran then.
    """
    starts = sorted(read_starts(run), key=lambda start: start["at"])
    state = read_state(run)
    if not starts or state is None:
        return None
    if len(starts) == 1:
        ends = [state["updated_at"]]
    else:
        recorded = [record.timestamp_ms / 1000 for record in read_journal(run)]
        ends = [max((t for t in recorded if a["at"] <= t < b["at"]), default=a["at"]) for a, b in pairwise(starts)]
        ends.append(state["updated_at"])
    return sum(start["world_size"] * (end - start["at"]) for start, end in zip(starts, ends, strict=True)) / DAY_S


def _data_of(manifest: Mapping[str, Any]) -> str | None:
    provenance = manifest.get("provenance", {})
    source = provenance.get("request", {}).get("source", {})
    # ImageNet can also be prepared as a task; then the task names the data set.
    kind = source.get("task") if source.get("kind") == "transfer" else source.get("kind")
    return data_of_corpus(kind, manifest.get("num_classes", 0), "view_of" in provenance)


def _sum(own: float | None, before: float | None) -> float | None:
    return None if own is None or before is None else own + before
