"""The corpora of a training, opened and checked: one, or those of a mixture in the classes of the mixture. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import Manifest, load_class_names, load_classes, load_manifest
from vitline.infra.config import digest_of
from vitline.infra.storage import Store, open_store
from vitline.vit.config import MixtureConfig, TrainConfig
from vitline.vit.corpora.mixture_classes import CorpusClasses, MixtureClasses, mixture_classes
from vitline.vit.input.config import InputConfig
from vitline.vit.input.mapped_labels import LabelMap, MappedLabels, find_kept_rows
from vitline.vit.input.mixture import whole_weights
from vitline.vit.input.order import Order
from vitline.vit.published.model_record import MixtureEntry, ModelProvenance

OpenCorpora = Mapping[str, tuple[Store, Manifest]]
"""Corpora that were opened before, by URI."""


class MixtureRecord(TypedDict):
    """`mixture.json` of a run: the corpora of its mixture, and the class of the mixture that each of their classes is."""

    corpora: list[MixtureEntry]
    class_map: str
    """`names`, `prefixed`, or the URI of the class table."""
    class_map_digest: str
    classes: list[str]
    label_maps: list[LabelMap]
    """For every corpus the class of the mixture of each label id; null for a class that is dropped."""


@dataclass
class TrainingCorpus:
    """One of the corpora. `label_map` is None for the only corpus of a training."""

    store: Store
    manifest: Manifest
    title: str
    weight: float = 1.0
    label_map: LabelMap | None = None
    num_classes: int = 0
    single_label: bool = True
    """Whether all corpora of the training have one label per image."""
    _labels: dict[str, MappedLabels] = field(default_factory=dict)

    def labels(self, split: str) -> MappedLabels | None:
        """The classes of a split in the mixture, with the rows that stay. Where classes are dropped, the first call reads the labels
        of the split. Raises ValueError if no row stays."""
        if self.label_map is None:
            return None
        if split not in self._labels:
            dropped = None in self.label_map
            kept = find_kept_rows(self.store, self.manifest, split, self.label_map) if dropped else None
            self._labels[split] = MappedLabels(self.label_map, self.num_classes, self.single_label, kept)
        return self._labels[split]

    @property
    def num_dropped(self) -> int:
        """Classes of the corpus that the mixture drops."""
        return (self.label_map or ()).count(None)

    def num_rows(self, split: str) -> int:
        """Examples of one epoch of a split."""
        labels = self.labels(split)
        return labels.kept.groups.num_rows if labels and labels.kept else self.manifest.split(split).num_rows

    def order(self, split: str, config: InputConfig, seed: int) -> Order:
        """The reading order of this corpus. Raises ValueError naming it where lanes or batch do not fit."""
        labels = self.labels(split)
        return Order.of(self.manifest, split, config, seed, labels.kept.groups if labels and labels.kept else None)


@dataclass(frozen=True)
class TrainingCorpora:
    """The corpora of a training; what identifies them, and what all have in common."""

    parts: tuple[TrainingCorpus, ...]
    classes: MixtureClasses | None = None
    """The classes of a mixture; None for one corpus."""
    class_map: str = ""

    @property
    def digest(self) -> str:
        """The corpus digest; of a mixture a digest of the corpora, their weights and classes."""
        if self.classes is None:
            return self.parts[0].manifest.digest
        weights = whole_weights([part.weight for part in self.parts]).tolist()
        digests = [part.manifest.digest for part in self.parts]
        return digest_of({"corpora": digests, "weights": weights, "classes": self.classes.digest})

    @property
    def class_map_digest(self) -> str:
        return self.classes.digest if self.classes else self.parts[0].manifest.class_map_digest

    @property
    def num_classes(self) -> int:
        return len(self.classes.names) if self.classes else self.parts[0].manifest.num_classes

    @property
    def single_label(self) -> bool:
        return all(part.manifest.single_label for part in self.parts)

    @property
    def decode_policy(self) -> DecodePolicy:
        return self.parts[0].manifest.decode_policy

    @property
    def shares(self) -> list[float]:
        """Fraction of the examples by corpus."""
        total = sum(part.weight for part in self.parts)
        return [part.weight / total for part in self.parts]

    def class_names(self) -> list[str]:
        return list(self.classes.names) if self.classes else load_class_names(self.parts[0].store)

    def with_split(self, split: str | None) -> list[TrainingCorpus]:
        """The corpora that have a split of this name."""
        return [part for part in self.parts if split in part.manifest.splits]

    def digests_in(self, inputs: Mapping[str, str]) -> list[str]:
        """The corpus digests that the `inputs` of a run name."""
        return [inputs[f"corpus.{i}"] for i in range(len(self.parts))] if self.classes else [inputs["corpus"]]

    def inputs(self) -> dict[str, str]:
        """What the run key covers of the corpora."""
        of_mixture = {f"corpus.{i}": part.manifest.digest for i, part in enumerate(self.parts)} if self.classes else {}
        # A corpus digest does not cover the decode policy, but the results of the run depend on it.
        return {"corpus": self.digest, "decode": digest_of(self.decode_policy), **of_mixture}

    def entries(self) -> list[MixtureEntry]:
        """The corpora of a mixture for records; empty for one corpus."""
        return [
            {
                "corpus": f"{part.manifest.name}/{part.manifest.version}",
                "digest": part.manifest.digest,
                "weight": part.weight,
                "share": share,
            }
            for part, share in zip(self.parts, self.shares, strict=True)
            if self.classes
        ]

    def provenance(self) -> ModelProvenance:
        """What a published model records of its mixture; nothing for one corpus."""
        if self.classes is None:
            return {}
        return {"mixture": self.entries(), "class_map": self.class_map, "class_map_digest": self.class_map_digest}

    def record(self) -> MixtureRecord | None:
        """What a run keeps of its mixture; None for one corpus."""
        if self.classes is None:
            return None
        return {
            "corpora": self.entries(),
            "class_map": self.class_map,
            "class_map_digest": self.class_map_digest,
            "classes": list(self.classes.names),
            "label_maps": list(self.classes.label_maps),
        }


def open_corpora(config: TrainConfig, opened: OpenCorpora | None = None) -> TrainingCorpora:
    """The corpora of a training; those of `opened` are not read again. Raises RuntimeError for a corpus that is missing, ValueError
    for a mixture that does not fit."""
    if config.mixture is None:
        store, manifest = open_corpus(config.corpus, opened)
        return TrainingCorpora((TrainingCorpus(store, manifest, manifest.name, single_label=manifest.single_label),))
    return _open_mixture(config.mixture, opened)


def open_corpus(uri: str, opened: OpenCorpora | None = None) -> tuple[Store, Manifest]:
    """The corpus at a URI with its manifest; that of `opened` is not read again. Raises UnreadableRecord."""
    if opened is not None and uri in opened:
        return opened[uri]
    store = open_store(uri)
    return store, load_manifest(store)


def _open_mixture(mixture: MixtureConfig, opened: OpenCorpora | None) -> TrainingCorpora:
    found = [open_corpus(each.corpus, opened) for each in mixture.corpora]
    stores, manifests = [store for store, _ in found], [manifest for _, manifest in found]
    _check_together(manifests)
    titles = corpus_titles(manifests)
    classes = mixture_classes([_classes_of(*each) for each in zip(stores, titles, strict=True)], mixture.class_map)
    single_label = all(manifest.single_label for manifest in manifests)
    parts = [
        TrainingCorpus(store, manifest, title, each.weight, label_map, len(classes.names), single_label)
        for store, manifest, title, each, label_map in zip(
            stores, manifests, titles, mixture.corpora, classes.label_maps, strict=True
        )
    ]
    whole_weights([part.weight for part in parts])  # raises for too many digits
    return TrainingCorpora(tuple(parts), classes, mixture.class_map)


def corpus_titles(manifests: Sequence[Manifest]) -> list[str]:
    """The names by which a class table names the corpora: NAME, or NAME/VERSION where several have one name."""
    count = Counter(manifest.name for manifest in manifests)
    return [m.name if count[m.name] == 1 else f"{m.name}/{m.version}" for m in manifests]


def _classes_of(store: Store, title: str) -> CorpusClasses:
    entries = load_classes(store)
    names = [entry["name"] for entry in entries]
    return CorpusClasses(title, names, [entry.get("source_id", entry["name"]) for entry in entries])


def _check_together(manifests: Sequence[Manifest]) -> None:
    """Raises ValueError for corpora that cannot be mixed."""
    first = manifests[0]
    for i, manifest in enumerate(manifests):
        title = f"{manifest.name}/{manifest.version}"
        if any(manifest.digest == other.digest for other in manifests[:i]):
            raise ValueError(f"The mixture has {title} twice. Name it once, with the sum of the weights.")
        check_same_decoding(manifest, first)


def check_same_decoding(one: Manifest, other: Manifest) -> None:
    """Raises ValueError for corpora whose images are decoded by different rules."""
    if one.decode_policy != other.decode_policy:
        raise ValueError(
            f"{one.name}/{one.version} and {other.name}/{other.version} were prepared with different decode policies, and a model "
            "has one. Prepare one of them again with the `recipe.decode` of the other."
        )
