"""Bad examples of a training: each is named once in the log, all are counted, and too many end the run."""

import logging
import math
from collections.abc import Sequence

from vitline.vit.input.batches import Batch
from vitline.vit.training.world import World

log = logging.getLogger(__name__)

_FEWEST_ALLOWED = 10
_NUM_SHOWN = 3


class BadExamples:
    """Counts the bad examples that all ranks have read since the workers started; the counts are equal on every rank.

    `num_rows` is the number of examples in an epoch. With the defaults none is allowed.
    """

    def __init__(self, max_fraction: float = 0.0, num_rows: int = 1) -> None:
        self.max_fraction, self.num_rows = max_fraction, num_rows
        self.count, self.num_read = 0, 0
        self._named: dict[str, None] = {}  # in the order of reading

    def name(self, micro_batches: Sequence[Batch]) -> int:
        """Logs the bad examples of this rank's step that were not named before. Returns how many bad ones the step has."""
        found = [text for batch in micro_batches for _, text in sorted(batch.bad)]
        for text in found:
            if text not in self._named:
                self._named[text] = None
                log.warning("bad example, which the training leaves out: %s", text)
        return len(found)

    def add(self, num_bad: int, num_read: int) -> None:
        """Counts a step of all ranks."""
        self.count += num_bad
        self.num_read += num_read

    @property
    def limit(self) -> int:
        """How many of the examples read until now may be bad.

        At least ten in each epoch that was begun, so that one bad image of a small corpus never ends a training.
        """
        if not self.max_fraction:
            return 0
        return max(int(self.max_fraction * self.num_read), _FEWEST_ALLOWED * math.ceil(self.num_read / self.num_rows))

    @property
    def too_many(self) -> bool:
        return self.count > self.limit

    def reason(self, world: World) -> str:
        """Why too many bad examples end the run, and the first of them. Every rank must call it."""
        of_ranks = world.gather("\n".join(list(self._named)[:_NUM_SHOWN]))
        first = [text for of_rank in of_ranks for text in of_rank.splitlines()][:_NUM_SHOWN]
        return (
            f"{self.count:,} of the {self.num_read:,} examples read since the workers started cannot be decoded, but "
            f"execution.max_bad_fraction={self.max_fraction:g} allows {self.limit:,} of so many. The first are: "
            f"{'; '.join(first)}. `vitline data verify NAME --pixels` lists all such images: restore their shards from a copy; "
            "or delete these and manifest.json, then run `vitline data prepare` again, which writes only the missing shards. If it "
            "lists none, the memory or the decoders of the workers are at fault."
        )
