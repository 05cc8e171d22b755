"""A series of small nights with real trainings, three seeds each, on six tasks; those after the third are decided early. Prints what each
says, after which tasks, and what it took.

`python -m tests.benchmarks.early_nights` takes about a quarter of an hour. Of the nights that are decided early one has a worse recipe, and
one is started again for its other scores.
"""

import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from vitline.flows.forms.forms import PipelineRequest, PrepareRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.forms.prepare_config import resolve_prepare
from vitline.flows.nights.from_records import earlier_nights
from vitline.flows.nights.promote import promote
from vitline.flows.runs.end_to_end import pretrain_then_transfer
from vitline.flows.runs.prepare_corpus import prepare_corpora
from vitline.flows.runs.services import Services, open_services
from vitline.infra.night import night_text
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

TASKS: dict[str, Callable[[int], int]] = {
    "parity": lambda digit: digit % 2,
    "thirds": lambda digit: digit % 3,
    "halves": lambda digit: digit // 5,
    "loops": lambda digit: int(digit in (0, 6, 8, 9)),
    "fifths": lambda digit: digit % 5,
}
"""By name: the class of a digit. Each task has other images."""
FORM: dict[str, Any] = {
    "name": "early",
    "corpus": "digits-0-to-4",
    "recipe": "digits",
    "tasks": ("digits-5-to-9", *TASKS),
    "from_scratch": False,
}
OVERRIDES: dict[str, Any] = {
    "execution.num_workers": 1,
    "recipe.total_steps": 60,
    "recipe.optim.warmup_steps": 6,
    "protocol.total_steps": 30,
    "protocol.warmup_steps": 3,
    "protocol.learning_rates": [0.1],
    "nights.num_seeds": 3,
    "nights.smallest_effect": 0.02,
    "nights.promote": False,
}
WORSE = {"recipe.total_steps": 2, "recipe.optim.warmup_steps": 1}
FIRST = datetime(2026, 1, 1, 2, tzinfo=UTC)


def prepare_tasks(folder: Path, services: Services) -> None:
    images, labels = load_digits(return_X_y=True)
    for nth, (name, class_of) in enumerate(TASKS.items()):
        for i in range(nth, len(labels), len(TASKS)):
            of_class = folder / name / str(class_of(int(labels[i])))
            of_class.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(images[i].reshape(8, 8) * 16, 0, 255).astype(np.uint8)
            Image.fromarray(np.repeat(pixels[..., None], 3, axis=2)).save(of_class / f"{i:04d}.png")
        request = PrepareRequest(source=str(folder / name), name=name, val_fraction=0.1, test_fraction=0.4)
        prepare_corpora([resolve_prepare(services.root, request)], services)


def run_night(services: Services, nth: int, what: str, **changes: Any) -> None:
    night, began = FIRST + timedelta(nth), time.monotonic()
    request = PipelineRequest(**FORM, seed=10 * nth, overrides=OVERRIDES | changes)
    done = pretrain_then_transfer(resolve_pipeline(services.root, request, night), services)
    record = done.record
    spent = sum(stage.wall_s for stage in record.stages if stage.stage == "evaluate")
    print(f"\n{night_text(night)}  {what}: {time.monotonic() - began:.0f} s, evaluation {spent:.0f} s")
    print(f"  {done.night.sentence if done.night else 'no verdict'}")
    print(f"  {f'look at level {record.look.level:.4f}' if record.look else 'all scores at once'}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(root=f"{folder}/store", home=Path(folder, "home"))
        with open_services(settings) as services:
            prepare_tasks(Path(folder), services)
            for nth in range(3):
                run_night(services, nth, "of known recipe")
            first = earlier_nights(open_store(services.root), FORM["name"], FIRST + timedelta(1))[0]
            promote(open_store(services.root), first.key, why="the first", by="the benchmark")
            for nth in range(3, 5):
                run_night(services, nth, "of known recipe")
            run_night(services, 5, "a planted bug: training ends after 2 steps", **WORSE)
            run_night(services, 6, "the bug is mended")
            run_night(services, 6, "the same night again, for its other scores", **{"nights.early_verdict": False})


if __name__ == "__main__":
    main()
