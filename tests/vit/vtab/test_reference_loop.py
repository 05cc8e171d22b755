"""A trial, compared with a plain fine-tuning loop: timm's network, Pillow, SciPy and twelve lines of PyTorch."""

import io
import math

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F
from PIL import Image

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.shard_format import ShardReader, load_manifest
from vitline.infra.storage import open_store
from vitline.vit.convert.timm import to_timm
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef, plan_task_sweeps
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.evaluation.run_trial import run_trial
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.input.order import Order
from vitline.vit.models.build import build_network
from vitline.vit.models.config import ViTConfig
from vitline.vit.published.models import publish

from ..unleased import Unleased

STEPS, WARMUP, LR, BATCH = 20, 4, 0.1, 32
NETWORK = ViTConfig(image_size_px=16, patch_size_px=4, embed_dim=32, depth=2, num_heads=4, mlp_dim=64, pre_logits=True)
PROTOCOL = Protocol(
    name="plain",
    image_size_px=8,
    learning_rates=(LR,),
    total_steps=(STEPS,),
    warmup_steps=WARMUP,
    clip_norm=0.5,
    global_batch_size=BATCH,
    num_lanes=4,
    augment=AugmentConfig(image_size_px=8, train_crop="none", flip=False, antialias=False),
)


@pytest.fixture
def source(root):
    """An untrained network for images of 16 px and three classes, and the URI of its published model."""
    torch.manual_seed(3)
    network = build_network(NETWORK, 3)
    torch.nn.init.normal_(network.head.weight)
    contract = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=16))
    uri = publish(open_store(root).child("models"), "source", "1", network, contract, ["a", "b", "c"], {})
    return network, uri


def pictures(corpus, split):
    """Pixels (n, 3, 8, 8) from -1 to 1 and labels of a split, in the order of its rows."""
    with ShardReader(corpus, load_manifest(corpus), split) as reader:
        tables = [reader.row_group(i, ["image", "label"]) for i in range(reader.split.num_row_groups)]
    images = [row["bytes"] for table in tables for row in table["image"].to_pylist()]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images])
    labels = torch.tensor([label for table in tables for label in table["label"].to_pylist()])
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(127.5) - np.float32(1)), labels


def plain_network(timm, network):
    """timm's network for 8 px with these weights: positions zoomed as in the original code, a head of zeros."""
    args, state = to_timm(build_transfer(network))
    cls, grid = state["pos_embed"][:, :1], state["pos_embed"][0, 1:].reshape(4, 4, -1).numpy()
    zoomed = torch.from_numpy(scipy.ndimage.zoom(grid, (0.5, 0.5, 1), order=1)).reshape(1, 4, -1)
    state |= {"pos_embed": torch.cat([cls, zoomed], dim=1)}
    state |= {"head.weight": torch.zeros(10, 32), "head.bias": torch.zeros(10)}
    model = timm.create_model(args.pop("model_name"), **(args | {"img_size": 8, "num_classes": 10}))
    model.load_state_dict(state)
    return model


def build_transfer(network):
    """The network without its pre-logits layer, which timm does not have and fine-tuning drops."""
    bare = build_network(NETWORK.for_transfer(16), 3)
    bare.load_state_dict({k: v for k, v in network.state_dict().items() if not k.startswith("pre_logits.")})
    return bare


def learning_rate(step):
    decay = 0.5 * (1 + math.cos(math.pi * max(step - WARMUP, 0) / (STEPS - WARMUP)))
    return LR * min(step / WARMUP, 1) * decay


def test_trial_equals_a_plain_fine_tuning_loop(timm, source, digits, root):
    network, uri = source
    spec = EvaluationSpec(
        run_key="plain", tasks=(TaskRef(name="digits", corpus=digits.uri),), models=(uri,),
        architecture=NETWORK, protocol=PROTOCOL, root=root, seed=5,
    )  # fmt: skip
    (task_sweep,) = plan_task_sweeps(spec)
    trial = task_sweep._trial("final", task_sweep.settings[0])
    result, _ = run_trial(Unleased(open_store(root), 1), trial)

    manifest = load_manifest(digits)
    order = Order(
        manifest.split("train800val200"), corpus_digest=manifest.digest, seed=5, global_batch_size=BATCH, num_lanes=4,
        shuffle_window=4,
    )  # fmt: skip
    images, labels = pictures(digits, "train800val200")
    model, losses = plain_network(timm, network).train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for step in range(1, STEPS + 1):
        rows = order.rows(order.places(order.slots(step - 1))).row
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(loss.item())

    found = [loss for _, loss in result.train_losses]
    assert losses[0] == pytest.approx(math.log(10), rel=1e-6)  # a head of zeros
    assert losses[-1] < 0.95 * losses[0]
    assert found == pytest.approx(losses, rel=1e-4)
    images, labels = pictures(digits, "test")
    with torch.inference_mode():
        hits = (model.eval()(images).argmax(dim=1) == labels).sum().item()
    assert abs(round(result.top1 * result.num_examples) - hits) <= 1  # a tie in float32 may fall either way
