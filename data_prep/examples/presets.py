"""Requests for the corpora of the demonstration."""

from collections.abc import Callable

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, Digits, Icons, Letters

# A task keeps its exact numbers of examples, so duplicates within a split stay.
_TASK = CorpusRecipe(duplicates="keep")


def icons(cache: str = "") -> CorpusConfig:
    """Icons of 23 open sets for pre-training, of other things than the task shows."""
    return CorpusConfig(name="icons", source=Icons(role="pretrain", cache=cache))


def new_icons(cache: str = "") -> CorpusConfig:
    """Icons of 28 other sets as a task of 800 + 200 examples, by what they show."""
    return CorpusConfig(name="new-icons", source=Icons(role="task", cache=cache), recipe=_TASK)


def letters(cache: str = "") -> CorpusConfig:
    """Letters of 58 handwriting fonts as a task of 780 + 208 examples, other fonts in test."""
    return CorpusConfig(name="letters", source=Letters(cache=cache), recipe=_TASK)


def digits() -> CorpusConfig:
    """All ten digits as a task of 800 + 200 examples."""
    return CorpusConfig(name="digits", source=Digits(), recipe=_TASK)


def digits_0_to_4() -> CorpusConfig:
    """Digits for pre-training if the icons cannot be fetched."""
    return CorpusConfig(
        name="digits-0-to-4", source=Digits(digits=(0, 1, 2, 3, 4), num_train=750, num_val=100), recipe=_TASK
    )


def digits_5_to_9() -> CorpusConfig:
    """The task for `digits_0_to_4`: 400 + 100 examples, because there are only 896 images."""
    return CorpusConfig(
        name="digits-5-to-9", source=Digits(digits=(5, 6, 7, 8, 9), num_train=400, num_val=100), recipe=_TASK
    )


PRESETS: dict[str, Callable[[], CorpusConfig]] = {
    "icons": icons,
    "new-icons": new_icons,
    "letters": letters,
    "digits": digits,
    "digits-0-to-4": digits_0_to_4,
    "digits-5-to-9": digits_5_to_9,
}
