"""A frozen-feature pass against the bare forward pass: decode, resize, forward and writing, over forward alone. With `--predictions`
a batch prediction in place of features.

    .venv/bin/python tests/benchmarks/frozen_features.py [--predictions] [--rounds 7] [--turns 5] [--images 16] [--batch 16] [s16 b32]

Both sides in one process, the same network, batch size and inference mode; the bare side has its input ready in memory as
float tensors. The ratio is taken within a round, in which the sides take turns. JPEG at 500 x 375, cut from scikit-learn's two
photographs, prepared as a corpus and read from its shards. Bar: 0.9, of predictions 0.95. By wall time decoding runs beside the
network, in a thread; CPU-seconds count it in full, and depend little on other work on the machine.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from input import interval
from PIL import Image

from vitline.data_prep.config import ClassFolders, CorpusConfig, CorpusRecipe
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.find_corpus import corpus_store
from vitline.data_prep.prepare.job import prepare
from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.evaluation_plan import resolve_predict
from vitline.flows.forms.forms import PredictRequest
from vitline.infra.config import digest_of
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.evaluate import published_digest
from vitline.vit.features.extract_features import Extractor
from vitline.vit.features.feature_plan import FeatureSource, plan_parts
from vitline.vit.features.predict import Predictor
from vitline.vit.features.prediction_plan import plan_predictions
from vitline.vit.input.batches import eval_batches
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.build import build_network
from vitline.vit.models.network import normalised
from vitline.vit.models.variants import network_variant
from vitline.vit.published.models import publish

SPLIT = "train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=["s16", "b32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=5, help="of each side in a round")
    parser.add_argument("--images", type=int, default=16, help="of each turn")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--predictions", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, one thread, batch {asked.batch}, {asked.rounds} rounds of {asked.turns} turns of "
        f"{asked.images} images"
    )
    with tempfile.TemporaryDirectory() as folder:
        corpus = photographs(Path(folder), asked.images)
        for variant in asked.variants:
            compare(variant, corpus, open_store(folder), asked)


def photographs(folder: Path, count: int) -> Store:
    """A corpus of `count` cuts of two photographs."""
    from sklearn.datasets import load_sample_images

    rng, photos = np.random.default_rng(0), [Image.fromarray(image) for image in load_sample_images().images]
    for i in range(count):
        photo, width = photos[i % 2], int(rng.integers(480, 640))
        height = round(width * 3 / 4)
        left, top = int(rng.integers(0, 641 - width)), int(rng.integers(0, max(428 - height, 1)))
        file = folder / "photos" / f"class{i % 2}" / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        cut = photo.crop((left, top, left + width, top + height)).resize((500, 375), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        cut.save(buffer, "JPEG", quality=95)
        file.write_bytes(buffer.getvalue())
    sizes = [file.stat().st_size for file in (folder / "photos").rglob("*.jpg")]
    print(f"{statistics.mean(sizes) / 1e3:.0f} KB an image")
    request = CorpusConfig(
        name="photographs",
        source=ClassFolders(path=str(folder / "photos")),
        recipe=CorpusRecipe(duplicates="keep", val_fraction=0, test_fraction=0),
    )
    prepare([request], str(folder))
    return corpus_store(open_store(folder), request)


def compare(variant: str, corpus: Store, root: Store, asked: argparse.Namespace) -> None:
    manifest, view = load_manifest(corpus), AugmentConfig(image_size_px=224)
    assert manifest.split(SPLIT).num_rows == asked.images
    contract = ImageContract(decode=DecodePolicy(), evaluation=view)
    network = build_network(network_variant(variant), 2)
    uri = publish(root.child("models"), variant, "1", network, contract, ["0", "1"], {})
    if asked.predictions:
        request = PredictRequest(model=uri, corpus=corpus.uri, splits=(SPLIT,))
        parts = plan_predictions(resolve_predict(root.uri, request), manifest)
        extractor: Extractor = Predictor(root.uri, batch_size=asked.batch)
    else:
        source = FeatureSource(
            model=uri,
            model_digest=published_digest(uri) or "",
            corpus=corpus.uri,
            corpus_digest=manifest.digest,
            decode_digest=digest_of(manifest.decode_policy),
        )
        parts, extractor = plan_parts(source, manifest, SPLIT), Extractor(root.uri, batch_size=asked.batch)
    source = parts[0].source
    network = extractor.model(source).network
    with eval_batches(corpus, manifest, SPLIT, view, batch_size=asked.batch) as batches:
        inputs = [normalised(batch.images, contract.low, contract.high) for batch in batches]

    @torch.inference_mode()
    def bare() -> None:
        for images in inputs:
            network(images) if asked.predictions else network.features(images)

    def whole() -> None:
        assert len(list(extractor.ensure(parts))) == len(parts)

    def spend(side: Callable[[], None]) -> np.ndarray:
        for part in parts:
            root.child(source.folder).delete(part.key)
        return seconds(side)

    spend(bare), spend(whole)  # warms up
    rows = []
    for i in range(1, asked.rounds + 1):
        spent = {bare: np.zeros(2), whole: np.zeros(2)}
        for turn in range(asked.turns):
            for side in (bare, whole) if turn % 2 else (whole, bare):
                spent[side] += spend(side)
        rates = [asked.turns * asked.images / spent[side][0] for side in (bare, whole)]
        rows.append((*rates, *(spent[bare] / spent[whole])))
        print("  round {:2d}: {:6.2f} {:6.2f} images/s, ratio wall {:.3f}, CPU {:.3f}".format(i, *rows[-1]), flush=True)
    names = ("bare forward, images/s", "whole pass, images/s", "ratio, wall", "ratio, CPU-seconds")
    print(f"{variant}:")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print("  {:24s} {:7.3f}  [{:.3f}, {:.3f}]".format(name, *interval(column)))


def seconds(call: Callable[[], None]) -> np.ndarray:
    """Wall and CPU seconds of a call."""
    started = np.array([time.perf_counter(), time.process_time()])
    call()
    return np.array([time.perf_counter(), time.process_time()]) - started


if __name__ == "__main__":
    main()
