"""Mean average precision, compared with scikit-learn, for one worker and for several."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from vitline.vit.training import average_precision
from vitline.vit.training.average_precision import AveragePrecision
from vitline.vit.training.world import World


@dataclass
class Meeting:
    """Where threads that stand for ranks add up their tensors."""

    barrier: threading.Barrier
    values: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class ThreadWorld(World):
    meeting: Meeting | None = None

    def sum(self, values):
        self.meeting.values.append(values)
        self.meeting.barrier.wait()
        total = torch.stack(self.meeting.values).sum(dim=0)
        self.meeting.barrier.wait()
        self.meeting.values.clear()
        self.meeting.barrier.wait()
        return total


def over_ranks(scores, labels, size):
    """The result of each rank, where rank r has rows N r // W to N (r + 1) // W in batches of 7."""
    meeting, found = Meeting(threading.Barrier(size)), {}

    def work(rank):
        ranked = AveragePrecision()
        rows = range(len(scores) * rank // size, len(scores) * (rank + 1) // size)
        for start in range(rows.start, rows.stop, 7):
            part = slice(start, min(start + 7, rows.stop))
            ranked.add(scores[part], labels[part])
        found[rank] = ranked.mean(ThreadWorld(rank=rank, size=size, meeting=meeting), scores.shape[1])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(found.values())


@pytest.mark.parametrize("levels", [3, 1000])  # with 3, most scores are equal to others
@pytest.mark.parametrize("values_at_a_time", [2**23, 130])  # 130: two classes at a time
def test_it_is_that_of_scikit_learn_for_any_number_of_workers(monkeypatch, levels, values_at_a_time):
    monkeypatch.setattr(average_precision, "CHUNK_VALUES", values_at_a_time)
    rng = np.random.default_rng(levels)
    scores = rng.integers(0, levels, (60, 5)).astype(np.float32)
    labels = (rng.random((60, 5)) < [0.5, 0.1, 0.02, 0.9, 0]) * rng.uniform(0.5, 1, (60, 5)).astype(np.float32)
    there = [k for k in range(5) if labels[:, k].any()]
    assert len(there) < 5  # a class without an example is left out
    expected = np.mean([average_precision_score(labels[:, k] > 0, scores[:, k]) for k in there])
    for size in (1, 2, 3):
        found = over_ranks(torch.from_numpy(scores), torch.from_numpy(labels), size)
        assert found == [pytest.approx(expected, abs=1e-12)] * size
