"""One published model on three small tasks, one of each group of VTAB, in float32 and in bfloat16: do precisions differ less than seeds?

    python -m tests.benchmarks.precisions [--seeds 5] [--task natural-digits ...]

takes about ten minutes. Natural: digits before a photograph, as in SVHN. Specialized: from which part of a photograph a patch is cut.
Structured: the column of a shape of random kind, size and orientation, as in dSprites. By the protocol `small-images` at one setting.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits, load_sample_images

from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest, PrepareRequest, PretrainRequest
from vitline.flows.forms.prepare_config import resolve_prepare
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.runs.evaluate_tasks import evaluate_tasks
from vitline.flows.runs.prepare_corpus import prepare_corpora
from vitline.flows.runs.pretrain import train_model
from vitline.flows.runs.services import Services, open_services
from vitline.infra.settings import Settings
from vitline.vit.evaluation.evaluate import Score

SIDE_PX = 32
IMAGES = 1_797
COLUMNS = 8
PARTS = 8
PROTOCOL = {"protocol.total_steps": 200, "protocol.warmup_steps": 20, "protocol.learning_rates": [0.03]}
PRECISIONS = ("float32", "bfloat16")

PHOTOGRAPHS = [Image.fromarray(photograph) for photograph in load_sample_images().images]

Labelled = Iterator[tuple[Image.Image, int]]


def patch(photograph: Image.Image, left: float, rng: np.random.Generator, part: float = 1.0) -> Image.Image:
    """A random patch whose left edge is in the `part` of the width that begins at `left`, both as fractions."""
    x = round((left + part * rng.random()) * (photograph.width - SIDE_PX))
    y = int(rng.integers(photograph.height - SIDE_PX))
    return photograph.crop((x, y, x + SIDE_PX, y + SIDE_PX))


def digits_before_a_photograph(rng: np.random.Generator) -> Labelled:
    background = PHOTOGRAPHS[0]
    for pixels, label in zip(*load_digits(return_X_y=True), strict=True):
        mask = Image.fromarray(np.clip(pixels.reshape(8, 8) * 16, 0, 255).astype(np.uint8)).resize((24, 24))
        image = patch(background, 0, rng).point(lambda value: value // 3)  # else 200 steps learn nothing
        red, green, blue = (int(rng.integers(128, 256)) for _ in range(3))
        x, y = (int(rng.integers(9)) for _ in range(2))
        image.paste((red, green, blue), (x, y), mask)
        yield image, int(label)


def parts_of_photographs(rng: np.random.Generator) -> Labelled:
    of_each = PARTS // 2
    for i in range(IMAGES):
        label = i % PARTS
        photograph = PHOTOGRAPHS[label // of_each]
        yield patch(photograph, label % of_each / of_each, rng, 1 / of_each), label


def columns_of_shapes(rng: np.random.Generator) -> Labelled:
    for i in range(IMAGES):
        label = i % COLUMNS
        corners, radius = int(rng.integers(3, 7)), float(rng.uniform(3, 6))
        center = ((label + rng.random()) * SIDE_PX / COLUMNS, float(rng.uniform(6, SIDE_PX - 6)))
        image = Image.new("RGB", (SIDE_PX, SIDE_PX))
        draw = ImageDraw.Draw(image)
        draw.regular_polygon((*center, radius), corners, rotation=int(rng.integers(360)), fill="white")
        yield image, label


TASKS = {
    "natural-digits": digits_before_a_photograph,
    "specialized-patches": parts_of_photographs,
    "structured-columns": columns_of_shapes,
}


def prepare_all(folder: Path, services: Services, tasks: Sequence[str]) -> None:
    for nth, name in enumerate(tasks):
        drawn = TASKS[name]
        for i, (image, label) in enumerate(drawn(np.random.default_rng(nth))):
            of_class = folder / name / str(label)
            of_class.mkdir(parents=True, exist_ok=True)
            image.save(of_class / f"{i:04d}.png")
        request = PrepareRequest(source=str(folder / name), name=name, val_fraction=0.1, test_fraction=0.5)
        prepare_corpora([resolve_prepare(services.root, request)], services)


def pretrain_model(services: Services) -> None:
    prepare_corpora([resolve_prepare(services.root, PrepareRequest(preset="digits-0-to-4"))], services)
    request = PretrainRequest(
        name="digits", corpus="digits-0-to-4", recipe="digits", overrides={"execution.num_workers": 1}
    )
    train_model(resolve_pretrain(services.root, request), services)


def scored(services: Services, precision: str, tasks: Sequence[str], seeds: int) -> list[Score]:
    request = EvaluateRequest(
        model="digits",
        tasks=tuple(tasks),
        num_seeds=seeds,
        overrides=PROTOCOL | {"protocol.precision": precision},
    )
    (plan,) = resolve_evaluate(services.root, request)
    return evaluate_tasks("precisions", plan, services)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", action="append", choices=[*TASKS])
    given = parser.parse_args()
    tasks = given.task or [*TASKS]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(root=f"{folder}/store", home=Path(folder, "home"))
        with open_services(settings) as services:
            prepare_all(Path(folder), services, tasks)
            pretrain_model(services)
            by_precision = {precision: scored(services, precision, tasks, given.seeds) for precision in PRECISIONS}
    for task in tasks:
        print_task(task, [np.array([s.value for s in by_precision[p] if s.task == task]) for p in PRECISIONS])


def print_task(task: str, top1: list[np.ndarray]) -> None:
    (full, half), differences = top1, 100 * (top1[1] - top1[0])
    print(
        f"{task}: float32 {100 * full.mean():.2f} ± {100 * full.std(ddof=1):.2f}, bfloat16 {100 * half.mean():.2f} ± "
        f"{100 * half.std(ddof=1):.2f}, difference {differences.mean():+.2f}, standard error "
        f"{differences.std(ddof=1) / len(differences) ** 0.5:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
