"""A small network for the digits, published untrained and after a short training."""

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import load_class_names, load_manifest
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef
from vitline.vit.evaluation.probes import PROBES
from vitline.vit.features import extract_features
from vitline.vit.features.extract_features import Extractor
from vitline.vit.features.frozen import frozen_scores
from vitline.vit.features.score_probes import score_probe
from vitline.vit.input.batches import eval_batches
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.published.models import publish

from . import tiny_protocol

VIEW = AugmentConfig(image_size_px=8)
ARCHITECTURE = ViTConfig(image_size_px=8, patch_size_px=4, embed_dim=48, depth=2, num_heads=4, mlp_dim=96, pool="gap")


def published(root, name, network, classes, view=VIEW) -> str:
    contract = ImageContract(decode=DecodePolicy(), evaluation=view)
    return publish(open_store(root).child("models"), name, "1", network, contract, classes, {})


def reference(digits, manifest, split, model):
    """Features and labels by one forward pass over the split as evaluation reads it."""
    num_rows = manifest.split(split).num_rows
    with eval_batches(digits, manifest, split, model.contract.evaluation, batch_size=num_rows) as batches:
        (batch,) = batches
    with torch.inference_mode():
        return model.network.features(model.normalised(batch.images.numpy())), batch.labels


@pytest.fixture(scope="session")
def models(tmp_path_factory, digits) -> SimpleNamespace:
    """URIs: `.untrained`, and `.trained` on train800 for 60 steps."""
    root, classes = str(tmp_path_factory.mktemp("models")), load_class_names(digits)
    torch.manual_seed(0)
    network = VisionTransformer(ARCHITECTURE, len(classes))
    untrained = published(root, "untrained", network, classes)
    with eval_batches(digits, load_manifest(digits), "train800", VIEW, batch_size=800) as batches:
        (batch,) = batches
    images = batch.images.permute(0, 3, 1, 2).float() / 127.5 - 1
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(network.train()(images), batch.labels).backward()
        optimizer.step()
    return SimpleNamespace(untrained=untrained, trained=published(root, "trained", network, classes))


@pytest.fixture
def images_forwarded(monkeypatch) -> list[int]:
    """The number of images of each feature part that was computed."""
    seen: list[int] = []
    real = extract_features.part_features

    def counted(network, contract, batches, num_rows, device):
        seen.append(num_rows)
        return real(network, contract, batches, num_rows, device)

    monkeypatch.setattr(extract_features, "part_features", counted)
    return seen


@pytest.fixture
def probe_spec(root, digits):
    """spec_for(name, *models): an evaluation of the digits with a named probe."""

    def make(name: str, *uris: str | None, **changes) -> EvaluationSpec:
        return EvaluationSpec(
            **{
                "run_key": f"{name}-000000000000",
                "tasks": (TaskRef(name="digits", corpus=digits.uri),),
                "models": uris,
                "architecture": ARCHITECTURE,
                "protocol": next(probe for probe in PROBES if probe.name == name),
                "root": root,
                **changes,
            }
        )

    return make


@pytest.fixture
def score(root):
    """score(spec): its scores, all computed in this process; `stop_after`: parts until a stop."""

    def go(spec: EvaluationSpec, stop_after: int | None = None):
        def compute(root: str, parts) -> Iterator:
            return islice(Extractor(root, batch_size=100).ensure(parts), stop_after)

        run = open_store(root).child(f"runs/{spec.run_key}")
        probe_trials = lambda root, todo: ((probe_trial, score_probe(root, probe_trial)) for probe_trial in todo)  # noqa: E731
        return frozen_scores(run, spec, compute, probe_trials)

    return go


@pytest.fixture
def model(root) -> str:
    """A published, untrained network."""
    return published(root, "tiny", VisionTransformer(tiny_protocol.ARCHITECTURE, 3), ["a", "b", "c"])


@pytest.fixture
def spec_of(root, digits):
    """spec_of(models, corpora): an evaluation of the tiny protocol."""

    def make(models=(None,), corpora=(digits.uri,)) -> EvaluationSpec:
        return EvaluationSpec(
            run_key="tiny-000000000000",
            tasks=tuple(TaskRef(name=f"digits{i}" if i else "digits", corpus=uri) for i, uri in enumerate(corpora)),
            models=models,
            architecture=tiny_protocol.ARCHITECTURE,
            protocol=tiny_protocol.PROTOCOL,
            root=root,
        )

    return make
