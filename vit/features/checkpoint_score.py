"""The scores of one checkpoint: features of its network, then nearest neighbours and few-shot least squares."""

import torch

from vitline.infra.storage import Store
from vitline.vit.checkpoints.manifest import WeightsError, open_checkpoint
from vitline.vit.checkpoints.read import read_checkpoint
from vitline.vit.config import CheckpointProbeConfig
from vitline.vit.corpora.probed_corpora import ProbedCorpus, probed_corpora
from vitline.vit.corpora.training_corpora import open_corpora
from vitline.vit.features.extract_features import BATCH_SIZE, part_features
from vitline.vit.features.features import Features
from vitline.vit.features.linear_probes import draw_shots, least_squares
from vitline.vit.features.nearest import nearest
from vitline.vit.input.batches import row_batches
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.network import Network
from vitline.vit.run.run_spec import RunSpec


def score_checkpoint(run: Store, prefix: str, device: torch.device) -> dict[str, float]:
    """The metrics of a committed checkpoint of a run: `probe/<corpus>/knn_top1` and `probe/<corpus>/fewshot_top1`, fractions.

    Raises WeightsError if it cannot be read, also because it was deleted meanwhile; ValueError if its features are not finite.
    """
    spec = RunSpec.model_validate(run.read_json("config.json"))
    config, probes = spec.config, spec.config.execution.probes
    corpora = open_corpora(config)
    network = checkpoint_network(run, prefix, spec, corpora.num_classes).to(device)
    contract = ImageContract(decode=corpora.decode_policy, evaluation=config.recipe.input.augment)
    scores: dict[str, float] = {}
    for corpus in probed_corpora(config, corpora):
        examples, scored = (
            split_features(network, contract, corpus, split, probes, device)
            for split in (corpus.examples, corpus.scored)
        )
        top1 = probe_scores(examples, scored, corpus.manifest.num_classes, probes.shots, config.recipe.seed)
        scores |= {f"probe/{corpus.title}/{name}": value for name, value in top1.items()}
    return scores


def checkpoint_network(run: Store, prefix: str, spec: RunSpec, num_classes: int) -> Network:
    """The network to score at a checkpoint, on the CPU and in evaluation mode: with the averaged weights where the recipe keeps an
    average. Nothing else of the checkpoint is read. Raises WeightsError."""
    recipe = spec.config.recipe
    group = "average/" if recipe.average_decay else "model/"
    if recipe.masked_patches is not None:
        group += "network."
    try:
        ref = open_checkpoint(run, prefix)
        tensors = read_checkpoint(run, ref, wanted=lambda name: name.startswith(group))
    except FileNotFoundError as gone:
        raise WeightsError(f"{run.uri_of(prefix)} was deleted") from gone
    network = build_network(recipe.model, num_classes)
    network.load_state_dict({name.removeprefix(group): value for name, value in tensors.items()})
    return network.eval()


def split_features(
    network: Network,
    contract: ImageContract,
    corpus: ProbedCorpus,
    split: str,
    probes: CheckpointProbeConfig,
    device: torch.device,
) -> Features:
    """Features of the first images of a split. Raises ValueError if they are not finite."""
    rows = range(min(probes.images, corpus.manifest.split(split).num_rows))
    view = contract.evaluation
    with row_batches(
        corpus.store, corpus.manifest, split, view, [rows], batch_size=BATCH_SIZE, threads=probes.cpus
    ) as batches:
        features = part_features(network, contract, batches, len(rows), device)
    if not features.values.isfinite().all():
        raise ValueError("its features are not finite; the training has probably diverged")
    return features


def probe_scores(examples: Features, scored: Features, num_classes: int, shots: int, seed: int) -> dict[str, float]:
    """Top-1 of nearest neighbours among all examples, and of least squares on `shots` examples of each class."""
    rows = draw_shots(examples.classes, num_classes, shots, seed)
    readout = least_squares(examples.values[rows], examples.classes[rows], num_classes)
    voted = nearest(scored.values, [(examples.values, examples.classes)]).vote(num_classes)
    predicted = {"knn_top1": voted, "fewshot_top1": readout.predict(scored.values)}
    return {name: scored.hits(classes) / len(scored.values) for name, classes in predicted.items()}
