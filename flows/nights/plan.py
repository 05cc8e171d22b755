"""What a night will be able to see, said before it is run."""

from datetime import datetime

from vitline.flows.forms.nights import NightSettings
from vitline.flows.nights.compare import visible_difference
from vitline.flows.nights.from_records import earlier_scores
from vitline.flows.nights.judge import FALSE_POSITIVE_RATE
from vitline.infra.storage import Store

MOST_SEEDS = 20


def plan_text(root: Store, name: str, night: datetime, nights: NightSettings) -> str:
    """One line: how many seeds the night has, and which difference two such nights show by the noise of earlier ones; of a
    long run, how far it trains."""
    if nights.advance_images is not None:
        images, cooldown = nights.advance_images, nights.cooldown_images or 0
        return f"night of a long run: {images:,} images more, and a cooldown of {cooldown:,} images that is scored"
    seeds = f"{nights.num_seeds} seed{'s' * (nights.num_seeds > 1)}"
    found = earlier_scores(root, name, night)
    detectable = (
        visible_difference(found[-1], found, nights.num_seeds, level=FALSE_POSITIVE_RATE / 2) if found else None
    )
    if detectable is None:
        several = "" if nights.num_seeds > 1 else "; nights.num_seeds=3 makes it known from this night on"
        return f"night of {seeds}: the noise between seeds is not known from earlier nights yet{several}"
    wanted = nights.smallest_effect
    text = f"night of {seeds}: by the noise of earlier nights, a difference of {100 * detectable:.1f} points is seen four times in five"
    if detectable <= wanted:
        return text
    for num in range(nights.num_seeds + 1, MOST_SEEDS + 1):
        more = visible_difference(found[-1], found, num, level=FALSE_POSITIVE_RATE / 2)
        if more is not None and more <= wanted:
            return f"{text}; the wanted {100 * wanted:.1f} take nights.num_seeds={num}"
    return f"{text}; the wanted {100 * wanted:.1f} take more than {MOST_SEEDS} seeds"
