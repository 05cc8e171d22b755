"""The corpora of a training as the loader takes them. Imports torch."""

from vitline.vit.corpora.training_corpora import TrainingCorpora
from vitline.vit.input.batches import Source


def sources_of(corpora: TrainingCorpora, split: str) -> list[Source]:
    """The split of each corpus, with its weight and its labels in the classes of the training."""
    return [Source(part.store, part.manifest, split, part.weight, part.labels(split)) for part in corpora.parts]
