"""The demo over several seeds: does pre-training on icons help on other icons and on letters by more than the noise?

    .venv/bin/python tests/benchmarks/demo_seeds.py [--seeds 0 1 2 3 4]

Settings are chosen on validation, for every seed and init anew. Prints a table with every run, the paired difference with its
standard error over seeds, and a logistic regression on 16 x 16 pixels, which needs no network. Adds what it measured to
tests/benchmarks/demo_scores.json, from which `figures.py` writes the tables of the documents. Takes about five minutes a seed on two
cores; finished stages are reused, those of `make demo` too where its stack is up.
"""

import argparse
import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

from vitline.data_prep.decode import decode
from vitline.data_prep.shard_format import ShardReader, load_manifest
from vitline.flows.cli.groups.stack import join_stack
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.on_prefect.deployments import DEMO
from vitline.flows.runs.end_to_end import pretrain_then_transfer
from vitline.flows.runs.services import open_services
from vitline.infra.provenance import versions
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import Score, init_text
from vitline.vit.evaluation.tasks import find_task_splits
from vitline.vit.input.augment import evaluation_pixels
from vitline.vit.input.config import AugmentConfig

sys.path.insert(0, str(Path(__file__).parent))
from figures import tables
from recorded_scores import RECORDS, Measurement, RecordedScore, measurements


def pixels_of(corpus_uri: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, 768) pixels of 16 x 16 images in [0, 1], and labels."""
    corpus = open_store(corpus_uri)
    manifest = load_manifest(corpus)
    images, labels = [], []
    with ShardReader(corpus, manifest, split) as reader:
        for group in range(reader.split.num_row_groups):
            for row in reader.row_group(group, ["image", "label"]).to_pylist():
                view = evaluation_pixels(decode(row["image"]["bytes"]), AugmentConfig(image_size_px=16))
                images.append(view.reshape(-1) / 255.0)
                labels.append(row["label"])
    return np.array(images), np.array(labels)


def logistic_regression(corpus_uri: str) -> float:
    """Test accuracy; the regularisation is chosen on val, then train and val are fitted."""
    splits = find_task_splits(load_manifest(open_store(corpus_uri)).splits, corpus_uri)
    train, val, both, test = (pixels_of(corpus_uri, s) for s in (splits.train, splits.val, splits.joined, splits.test))
    strengths = (0.01, 0.03, 0.1, 0.3, 1.0)
    fitted = [LogisticRegression(C=c, max_iter=5000).fit(*train).score(*val) for c in strengths]
    best = strengths[int(np.argmax(fitted))]
    return float(LogisticRegression(C=best, max_iter=5000).fit(*both).score(*test))


def machine() -> str:
    """Class of this processor: scores differ between kinds of kernels, not between machines of one kind."""
    import torch

    names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text()) or [platform.processor()]
    return f"{names[0].strip()}, kernels {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def record(scores: list[Score], baselines: dict[str, float]) -> Measurement:
    """Adds what was measured to the file that documents and the demo read."""
    found = Measurement(
        commit=str(versions().get("commit", ""))[:12],
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        scores=tuple(
            RecordedScore(
                task=s.task, seed=s.seed, init=init_text(s.model_digest), top1=s.value, peak_lr=s.chosen["peak_lr"]
            )
            for s in sorted(scores, key=lambda s: (s.task, s.seed, s.model_digest is None))
        ),
        baselines=baselines,
    )
    before = measurements() if RECORDS.exists() else []
    RECORDS.write_text(json.dumps([m.model_dump(mode="json") for m in (*before, found)], indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parser.parse_args().seeds
    join_stack(["demo-seeds"])
    settings = Settings()
    scores: list[Score] = []
    with open_services(settings) as services:
        for seed in seeds:
            plan = resolve_pipeline(settings.root, PipelineRequest(**DEMO, seed=seed))
            result = pretrain_then_transfer(plan, services)
            scores += [score.model_copy(update={"seed": seed}) for score in result.scores]
    uris = {corpus.manifest.name: corpus.uri for corpus in result.corpora}
    baselines = {task: logistic_regression(uris[task]) for task in sorted({score.task for score in scores})}
    for line in tables([record(scores, baselines)]):
        print(line)


if __name__ == "__main__":
    main()
