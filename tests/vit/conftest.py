"""A network, a recipe and batches small enough to train within a test; a package of user code; timm and transformers as modules."""

import itertools
import sys
import types

import pytest
import torch

from vitline.infra.config import replace
from vitline.vit.config import OptimConfig, TrainRecipe
from vitline.vit.input.batches import Batch
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.models.config import ViTConfig

NUM_CLASSES = 5


@pytest.fixture
def tiny_recipe() -> TrainRecipe:
    return TrainRecipe(
        model=ViTConfig(
            image_size_px=8, patch_size_px=4, embed_dim=16, depth=2, num_heads=2, mlp_dim=32, dropout_rate=0.1
        ),
        input=InputConfig(global_batch_size=8, num_lanes=2, augment=AugmentConfig(image_size_px=8)),
        optim=OptimConfig(peak_lr=1e-2, warmup_steps=2, weight_decay=0.1),
        total_steps=12,
        average_decay=0.9,
    )


@pytest.fixture
def changed(tiny_recipe):
    """changed(frozen="backbone"): the tiny recipe without dropout, with these settings of its optimizer."""
    return lambda **optim: replace(
        tiny_recipe, **{"model.dropout_rate": 0.0}, **{f"optim.{name}": value for name, value in optim.items()}
    )


@pytest.fixture
def own_lab(tmp_path, monkeypatch):
    """own_lab(nets="..."): the package `own_lab` in the current folder, which may be imported, with modules of these texts; its folder."""
    folder = tmp_path / "code" / "own_lab"

    def write(**modules):
        folder.mkdir(parents=True)
        for name, text in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.chdir(folder.parent)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("VITLINE_RECIPE_PACKAGES", "own_lab")
        return folder

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "own_lab"]:
        del sys.modules[name]


@pytest.fixture
def make_batch():
    """make_batch(step, size, start, padding): images and labels are a function of (step, position) alone."""

    def make(step: int, size: int = 8, start: int = 0, padding: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(step)
        images = torch.randint(0, 256, (64, 8, 8, 3), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, NUM_CLASSES, (64,), generator=generator)
        stop = start + size
        valid = torch.tensor([True] * size + [False] * padding)
        return Batch(
            images=torch.cat([images[start:stop], images[-padding:] if padding else images[:0]]),
            labels=torch.cat([labels[start:stop], labels[-padding:] if padding else labels[:0]]),
            valid=valid,
            first_slot=step * 8 + start,
            num_examples=size,
        )

    return make


@pytest.fixture
def start(root):
    """start(config): the run and attempt of a claimed spec, as a flow prepares it for the driver; `run` for one that goes on."""
    from ..trainings import begin

    def make(config, run=None, pause_at_step=None):
        run, lease = begin(config, root, run, pause_at_step=pause_at_step)
        return run, lease.attempt

    return make


@pytest.fixture
def finished(root):
    """finished(config, run): the run after an attempt that has come to its end."""
    from ..trainings import finish

    return lambda config, run=None: finish(config, root, run)


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step, run, attempt): trains an attempt that is asked to stop at this step of its own."""
    from vitline.infra.runs.stopping import StopPoller
    from vitline.vit.run.training_run import TrainingRun
    from vitline.vit.training.world import World

    def train(step, run, attempt):
        steps = itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(StopPoller, "asked", lambda poller: "preempted" if next(steps) == step else None)
            assert TrainingRun(run, attempt, World()).execute() == "preempted"

    return train


@pytest.fixture(autouse=True, scope="session")
def _single_torch_thread():
    """Networks this small are slower on two threads, and far slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _torchvision():
    """Lets timm and transformers import torchvision, whose compiled operators may be missing but must be declared.
    Keeps both libraries offline."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        try:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # the operators of this torchvision were loaded
            break
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield library


@pytest.fixture(scope="session")
def timm(_torchvision) -> types.ModuleType:
    import timm

    return timm


@pytest.fixture(scope="session")
def transformers(_torchvision) -> types.ModuleType:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers
