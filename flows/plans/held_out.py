"""What the score of a training on held-out images will say, before it is spent, and what it says, after it."""

from typing import TYPE_CHECKING, NamedTuple

from vitline.flows.catalog.lists import corpus_stats
from vitline.infra.html.text import percent
from vitline.infra.runs.run_state import RunStateRecord

if TYPE_CHECKING:
    from vitline.vit.config import TrainConfig
    from vitline.vit.corpora.training_corpora import TrainingCorpora, TrainingCorpus


class HeldOut(NamedTuple):
    """What a training will be scored on."""

    text: str
    is_telling: bool
    """Whether the score will tell anything."""


def held_out(config: "TrainConfig", corpora: "TrainingCorpora") -> HeldOut:
    """What a training will be scored on, or why its score will be missing or meaningless."""
    if corpora.num_classes == 1 and config.recipe.masked_patches is None:
        return HeldOut(
            "all images are of one class, so that any network has a top-1 of 100 % and learns nothing to tell images apart; add images "
            "of other classes, or train without labels (recipe.masked_patches)",
            False,
        )
    parts = corpora.with_split(config.val_split)
    if not parts:
        return HeldOut(
            "no held-out images, so the training ends without a score; prepare the corpus with recipe.val_fraction above 0, or from a "
            "source with a split val",
            False,
        )
    what = f"{sum(part.num_rows(str(config.val_split)) for part in parts):,} images of the split {config.val_split}"
    if config.recipe.masked_patches is not None:
        return HeldOut(f"the corrupted patches of {what}", True)
    majority = _majority_fraction(parts, str(config.val_split))
    if majority == 1:
        return HeldOut(f"{what}, which are all of one class, so that the score says nothing about the others", False)
    return HeldOut(what + (f"; the most frequent class alone is {percent(majority)}" if majority else ""), True)


def _majority_fraction(parts: "list[TrainingCorpus]", split: str) -> float | None:
    """The share of the most frequent class of a split; None of a mixture, a subset, and images of several labels."""
    manifest = parts[0].manifest
    if len(parts) > 1 or parts[0].label_map is not None or manifest.view_of is not None or not manifest.single_label:
        return None
    stats = corpus_stats(parts[0].store).stats
    if split not in stats.splits:
        return None
    counts = stats.splits[split].class_counts
    return float(counts.max() / counts.sum()) if counts.sum() else None


def score_text(state: RunStateRecord, *, labelled: bool) -> str:
    """`val 84.1 %`, with a note if it is meaningless, or why there is no score; empty for a training that is not `labelled`."""
    if "val_top1" not in state:
        return "no score, because there were no held-out images" if labelled else ""
    score = f"val {percent(state['val_top1'])}"
    if state.get("val_majority_fraction") == 1:
        score += f", which says nothing: all {state['val_examples']:,} held-out images are of one class"
    return score
