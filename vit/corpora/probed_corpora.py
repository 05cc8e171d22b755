"""Which corpora the checkpoints of a training are probed on, and when. Imports no torch, so that flows can refuse what does not fit."""

from typing import NamedTuple

from vitline.data_prep.shard_format import Manifest
from vitline.infra.storage import Store
from vitline.vit.config import TrainConfig
from vitline.vit.corpora.training_corpora import OpenCorpora, TrainingCorpora, corpus_titles, open_corpus

TRAIN, VAL = "train", "val"
"""Splits of a corpus that is named for probes."""


class ProbedCorpus(NamedTuple):
    """A corpus to probe on. `examples` and `scored` are its splits."""

    title: str
    """In the names of metrics: NAME, or NAME-VERSION where several have one name."""
    store: Store
    manifest: Manifest
    examples: str
    scored: str


def probed_corpora(
    config: TrainConfig, corpora: TrainingCorpora, opened: OpenCorpora | None = None
) -> list[ProbedCorpus]:
    """The corpora to probe a training on `corpora` on; empty if there are to be no probes. Those of `opened` are not read again.

    Raises ValueError naming a corpus that has several labels per image or lacks a split, and where the training has none to probe on.
    """
    probes = config.execution.probes
    if not probes.every_steps:
        return []
    if probes.corpora:
        found, splits = [open_corpus(uri, opened) for uri in probes.corpora], (TRAIN, VAL)
    else:
        found, splits = _of_training(config, corpora)
    for _, manifest in found:
        _check(manifest, splits)
    titles = [title.replace("/", "-") for title in corpus_titles([manifest for _, manifest in found])]
    return [ProbedCorpus(title, *each, *splits) for title, each in zip(titles, found, strict=True)]


def _of_training(config: TrainConfig, corpora: TrainingCorpora) -> tuple[list[tuple[Store, Manifest]], tuple[str, str]]:
    """The corpora of the training that have a validation split, and the names of the two splits."""
    val = config.val_split
    parts = corpora.with_split(val)
    if val is None or not parts:
        raise ValueError(
            f"execution.probes: the corpora of {config.name} have no validation split to score. Name others in "
            "execution.probes.corpora, or set execution.probes.every_steps=0."
        )
    return [(part.store, part.manifest) for part in parts], (config.split, val)


def _check(manifest: Manifest, splits: tuple[str, str]) -> None:
    title = f"{manifest.name}/{manifest.version}"
    if not manifest.single_label:
        raise ValueError(
            f"execution.probes: {title} may have several labels per image, and probes need one. Name other corpora in "
            "execution.probes.corpora."
        )
    if missing := [split for split in splits if split not in manifest.splits]:
        raise ValueError(
            f"execution.probes: {title} has no split {missing[0]!r}, only {', '.join(sorted(manifest.splits))}; probes take examples "
            f"from {splits[0]!r} and score {splits[1]!r}. Name another corpus in execution.probes.corpora."
        )


def is_due(step: int, probed: int, every_steps: int) -> bool:
    """Whether a checkpoint of `step` is to be probed, where the newest that was probed is of step `probed`: a multiple of
    `every_steps` lies between them, or is `step`."""
    return step // every_steps > probed // every_steps
