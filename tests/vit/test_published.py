"""Published models: loading is exact, a changed file is named, and fine-tuning starts as in the paper."""

import contextlib
import io
import os
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitline.data_prep.decode import DecodePolicy
from vitline.flows.cli.groups.model import describe_model
from vitline.flows.forms.finetune_config import resolve_finetune
from vitline.flows.forms.forms import FinetuneRequest
from vitline.infra.config import replace
from vitline.infra.records import UnreadableRecord
from vitline.infra.runs.lease import LeaseLost
from vitline.infra.storage import open_store
from vitline.vit.checkpoints.manifest import WeightsError
from vitline.vit.evaluation.evaluate import published_digest
from vitline.vit.input.config import AugmentConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.config import ViTConfig
from vitline.vit.models.vit import VisionTransformer
from vitline.vit.published.models import adapt, load_model, publish

from ..other_rounding import LOGITS_AWAY, other_rounding
from ..pictures import noise

CONFIG = ViTConfig(
    image_size_px=16, patch_size_px=4, embed_dim=16, depth=2, num_heads=2, mlp_dim=32, dropout_rate=0.5, pre_logits=True
)
CONTRACT = ImageContract(decode=DecodePolicy(), evaluation=AugmentConfig(image_size_px=16))
CLASSES = ["cat", "dog", "Ente", "鸟"]


@pytest.fixture
def network() -> VisionTransformer:
    """A network whose head is not zero, so that classes differ."""
    torch.manual_seed(0)
    network = VisionTransformer(CONFIG, len(CLASSES))
    torch.nn.init.normal_(network.head.weight)
    return network


@pytest.fixture
def published(network, root) -> str:
    return publish(open_store(root).child("models"), "birds", "1", network, CONTRACT, CLASSES, {"run_key": "birds-0a"})


def key_of(store, name):
    """Where a file of a published model lies."""
    return name if name == "config.json" else f"{store.read_json('config.json')['weights'].partition('/')[0]}/{name}"


def test_model_is_loaded_bit_for_bit(network, published):
    model = load_model(published)
    ours = network.state_dict()
    assert model.network.state_dict().keys() == ours.keys()
    for name, value in model.network.state_dict().items():
        assert torch.equal(value, ours[name]), name
    assert not model.network.training
    assert (model.classes, model.contract) == (tuple(CLASSES), CONTRACT)
    assert model.provenance == {"run_key": "birds-0a"}


def test_digest_depends_on_content_and_not_on_location(network, published, root):
    elsewhere = publish(open_store(root).child("other"), "x", "9", network, CONTRACT, CLASSES, {"run_key": "x-1"})
    digest = load_model(published).digest
    assert load_model(elsewhere).digest == digest
    others = [
        (network, CONTRACT, CLASSES[::-1]),
        (network, replace(CONTRACT, **{"evaluation.antialias": False}), CLASSES),
        (VisionTransformer(CONFIG, 4), CONTRACT, CLASSES),
    ]
    for number, (net, contract, classes) in enumerate(others):
        uri = publish(open_store(root).child("other"), "y", str(number), net, contract, classes, {})
        assert load_model(uri).digest != digest


def test_predictions_are_probabilities_over_all_classes_best_first(published, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(noise(1, (30, 20)))
    model = load_model(published)
    from_bytes, from_path = model.predict([noise(0, (30, 20)), path], top=10)
    for answer in (from_bytes, from_path):
        assert {name for name, _ in answer} == set(CLASSES)
        assert sum(p for _, p in answer) == pytest.approx(1, abs=1e-6)
        assert [p for _, p in answer] == sorted((p for _, p in answer), reverse=True)
    assert model.predict([]) == []


@pytest.mark.parametrize("processor", ["this one", "another"])
def test_prediction_depends_on_its_batch_by_rounding_only(published, tmp_path, processor):
    """Which kernel computes a batch depends on its size and on the processor, so the last digit is not promised."""
    path = tmp_path / "picture.png"
    path.write_bytes(noise(1, (30, 20)))
    model, logits = load_model(published), []
    model.network.register_forward_hook(lambda network, images, output: logits.append(output))
    with other_rounding() if processor == "another" else contextlib.nullcontext():
        _, among_others = model.predict([noise(0, (30, 20)), path], top=10)
        (alone,) = model.predict([str(path)], top=2)
    together, single = logits
    away = LOGITS_AWAY * float(together.abs().max())
    torch.testing.assert_close(single, together[1:], rtol=0, atol=away)
    assert [name for name, _ in alone] == [name for name, _ in among_others[:2]]
    # Where no logit moves by more than d, no probability moves by more than d / 2.
    assert [p for _, p in alone] == pytest.approx([p for _, p in among_others[:2]], rel=0, abs=away / 2)


def test_value_range_of_the_contract_is_applied(network, root):
    contract = replace(CONTRACT, low=0.0, high=1.0)
    uri = publish(open_store(root).child("models"), "unit", "1", network, contract, CLASSES, {})
    image = noise(3, (16, 16))
    pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(image)), dtype=np.float32) / 255)
    with torch.inference_mode():
        expected = network.eval()(pixels.permute(2, 0, 1)[None]).softmax(-1)[0]
    answer = dict(load_model(uri).predict([image])[0])
    assert [answer[name] for name in CLASSES] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("classes.json", b'"cat"', b'"cow"'),
        ("image_contract.json", b'"antialias": true', b'"antialias": false'),
        ("config.json", b'"num_heads": 2', b'"num_heads": 4'),
        ("classes.json", b"]", b""),
        ("image_contract.json", None, None),
    ],
)
def test_a_changed_or_missing_file_is_refused_by_name(published, file, old, new):
    store = open_store(published)
    key = key_of(store, file)
    if old is None:
        store.delete(key)
    else:
        data = store.read(key)
        assert data.count(old) == 1
        store.write(key, data.replace(old, new))
    with pytest.raises(WeightsError, match=file.replace(".", r"\.")) as refused:
        load_model(published)
    others = {"classes.json", "image_contract.json", "model.safetensors"} - {file}
    assert not any(other in str(refused.value) for other in others)


def test_changed_and_truncated_weights_are_refused_by_name(published):
    store = open_store(published)
    key = store.read_json("config.json")["weights"]
    data = store.read(key)
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-100]):
        store.write(key, damaged)
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            load_model(published)


@pytest.mark.parametrize("damaged", ["config.json", "classes.json", "weights"])
def test_a_damaged_model_is_whole_again_after_the_step_that_its_error_names(network, published, root, damaged):
    store = open_store(published)
    key = key_of(store, "model.safetensors" if damaged == "weights" else damaged)
    data = store.read(key)
    store.write(
        key, data[:-100] if damaged == "weights" else data.replace(b'"cat"', b'"cow"').replace(b": 2,", b": 4,")
    )
    with pytest.raises(WeightsError, match="delete the folder of the model and publish it again"):
        load_model(published)
    for left in store.list():
        store.delete(left)
    publish(open_store(root).child("models"), "birds", "1", network, CONTRACT, CLASSES, {})
    assert load_model(published).classes == tuple(CLASSES)


def test_model_that_a_suspended_attempt_publishes_again_is_not_changed(network, root):
    models, successor = open_store(root).child("models"), VisionTransformer(CONFIG, len(CLASSES))
    asked = []

    def overtaken():
        """The lease is still ours; right after this check the process is suspended, and its successor publishes."""
        asked.append(1)
        if len(asked) == 2:
            publish(models, "birds", "1", successor, CONTRACT, CLASSES, {"run_key": "birds-0a"})

    uri = publish(models, "birds", "1", network, CONTRACT, CLASSES, {"run_key": "birds-0a"}, overtaken)
    model, store = load_model(uri), open_store(uri)
    assert all(torch.equal(value, successor.state_dict()[name]) for name, value in model.network.state_dict().items())
    assert model.digest in store.read(key_of(store, "card.md")).decode()
    assert [key for key in store.list() if key.endswith("model.safetensors")] == [
        store.read_json("config.json")["weights"]
    ]


def test_attempt_that_wakes_after_its_successor_published_changes_nothing(network, root):
    """It is suspended before each of its writes in turn. Its successor has other weights and other values in the card."""
    models = open_store(root).child("models")
    successor, store_class = VisionTransformer(CONFIG, len(CLASSES)), type(models)
    for number in range(5):
        name, writes, found = f"birds-{number}", [], {}
        suspended = (store_class.create, store_class.writer)

        def overtaken(self, key, *rest, real, name=name, number=number, writes=writes, found=found):
            if len(writes) == number:
                writes.append("suspended")
                publish(models, name, "1", successor, CONTRACT, CLASSES, {"steps": 2})
                folder = self.read_json("config.json")["weights"].partition("/")[0]
                found.update({key: self.read(key) for key in ("config.json", *self.list(f"{folder}/"))})
            writes.append(key)
            return real(self, key, *rest)

        with pytest.MonkeyPatch.context() as patch:
            for method in suspended:
                patch.setattr(store_class, method.__name__, partialmethod(overtaken, real=method))
            uri = publish(models, name, "1", network, CONTRACT, CLASSES, {"steps": 1})
        store = open_store(uri)
        assert len(found) == 5
        assert {key: store.read(key) for key in store.list()} == found
        assert load_model(uri).provenance == {"steps": 2}


class Killed(BaseException):
    """Stands for the end of the process."""


def test_publication_that_is_killed_before_its_commit_is_marked_as_such(network, root, monkeypatch):
    models, before = open_store(root).child("models"), time.time()
    real = type(models).create

    def killed(self, key, data):
        if key == "config.json":
            raise Killed
        return real(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(type(models), "create", killed)
        with pytest.raises(Killed):
            publish(models, "birds", "1", network, CONTRACT, CLASSES, {"run_key": "birds-0a"})
    (marker,) = [key for key in models.list() if key.endswith("/publishing.json")]
    assert models.read_json(marker)["run_key"] == "birds-0a"
    assert before <= models.read_json(marker)["at"] <= time.time()
    uri = publish(models, "birds", "1", network, CONTRACT, CLASSES, {"run_key": "birds-0a"})
    assert not [key for key in models.list() if key.endswith("/publishing.json")]
    assert load_model(uri).provenance == {"run_key": "birds-0a"}


def test_weights_that_were_collected_before_the_commit_are_written_again(network, root, monkeypatch):
    """As from a process that was suspended for weeks between its last look at the lease and its commit."""
    models = open_store(root).child("models")
    real = type(models).create

    def collected(self, key, data):
        if key == "config.json":
            for left in self.list():
                self.delete(left)
        return real(self, key, data)

    monkeypatch.setattr(type(models), "create", collected)
    uri = publish(models, "birds", "1", network, CONTRACT, CLASSES, {})
    assert load_model(uri).classes == tuple(CLASSES)
    assert len(open_store(uri).list()) == 5


def test_attempt_that_lost_its_lease_publishes_nothing(network, root):
    def lost():
        raise LeaseLost("attempt 2 holds it")

    models = open_store(root).child("models")
    with pytest.raises(LeaseLost):
        publish(models, "birds", "1", network, CONTRACT, CLASSES, {}, lost)
    assert models.list() == []


def test_version_is_not_published_again_with_other_classes(network, published, root):
    with pytest.raises(ValueError, match=r"published already, with another classes\.json.*another name"):
        publish(open_store(root).child("models"), "birds", "1", network, CONTRACT, CLASSES[::-1], {})
    assert load_model(published).classes == tuple(CLASSES)


@pytest.mark.parametrize(("version", "by"), [(3, "9.1"), (3, ""), (None, "9.1"), ("2", "9.1")])
def test_model_of_a_newer_schema_version_is_refused_with_what_reads_it(network, published, root, version, by):
    store = open_store(published)
    store.write_json("config.json", store.read_json("config.json") | {"schema_version": version, "vitline_version": by})
    reads_it = r"Use vitline 9\.1, .* or a later version" if by else "Use the vitline that published it"
    refusal = rf"birds/1/config\.json has schema_version {version}, but this vitline reads 2\. {reads_it}"
    with pytest.raises(WeightsError, match=refusal):
        load_model(published)
    for use in (
        lambda: publish(open_store(root).child("models"), "birds", "1", network, CONTRACT, CLASSES, {}),
        lambda: published_digest(published),
        lambda: describe_model(published),
    ):
        with pytest.raises(UnreadableRecord, match=refusal):
            use()


def test_network_with_a_field_of_a_newer_version_is_refused_with_its_place(published, root):
    store = open_store(published)
    config = store.read_json("config.json")
    store.write_json("config.json", config | {"model": config["model"] | {"rope_base": 100}})
    refusal = r"birds/1/config\.json is not a record that this version .*: vit\.rope_base: there is no such field\. Use the version"
    for use in (
        lambda: describe_model(published),
        lambda: resolve_finetune(root, FinetuneRequest(model="birds", corpus="digits")),
    ):
        with pytest.raises(UnreadableRecord, match=refusal):
            use()


def test_error_for_a_folder_without_a_model_names_the_next_step(tmp_path):
    with pytest.raises(WeightsError, match=r"not a published model.*vitline model ls"):
        load_model(str(tmp_path))


@pytest.fixture
def working_directory(tmp_path, monkeypatch):
    """A working directory without any settings of vitline."""
    monkeypatch.chdir(tmp_path)
    for name in ("VITLINE_ROOT", "VITLINE_HOME", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(root, network, version, created_at) -> str:
    models = open_store(str(root)).child("models")
    uri = publish(models, "birds", version, network, CONTRACT, CLASSES, {"run_key": f"birds-{version}"})
    config = models.read_json(f"birds/{version}/config.json")
    models.write_json(f"birds/{version}/config.json", config | {"created_at": created_at})
    return uri


def test_model_is_loaded_by_the_name_that_commands_use(network, working_directory, monkeypatch):
    store = working_directory / ".vitline" / "store"
    newest, old = put(store, network, "0a", 2.0), put(store, network, "0b", 1.0)
    for name in ("birds", "birds/0a", newest, ".vitline/store/models/birds/0a", store / "models/birds/0a"):
        assert load_model(name).provenance == {"run_key": "birds-0a"}, name
    assert load_model("birds/0b").uri == old
    with pytest.raises(WeightsError, match=r"'crows' is not a published model below .*; available: birds/0a, birds/0b"):
        load_model("crows")
    elsewhere = put(working_directory / "elsewhere", network, "0c", 1.0)
    monkeypatch.setenv("VITLINE_ROOT", str(working_directory / "elsewhere"))
    assert load_model("birds").uri == elsewhere


def test_store_of_a_stopped_stack_is_read_or_the_next_step_is_named(network, working_directory, monkeypatch):
    from vitline.infra.local.stack_config import StackConfig

    def environment():
        return {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}  # torch sets its own

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    directory, before = working_directory / ".vitline" / "stack", environment()
    directory.mkdir(parents=True)

    def stack(object_store):
        ports = dict.fromkeys(("s3", "mlflow", "prefect", "ray"), 9)
        config = StackConfig(id="0a", directory=directory, ports=ports, object_store=object_store)
        (directory / "stack-config.json").write_text(config.model_dump_json(exclude={"directory"}))

    stack(object_store=True)
    with pytest.raises(WeightsError, match=r"'birds' is not a .* is down, .* `vitline stack up` starts it"):
        load_model("birds")
    stack(object_store=False)
    uri = put(directory / "store", network, "0d", 1.0)
    assert load_model("birds").uri == uri
    assert environment() == before


def test_inconsistent_model_is_not_published(network, root):
    models = open_store(root).child("models")
    with pytest.raises(ValueError, match="3 class names, but the head has 4"):
        publish(models, "x", "1", network, CONTRACT, CLASSES[:3], {})
    with pytest.raises(ValueError, match="contract resizes to 32 px, but the network takes 16 px"):
        publish(models, "x", "1", network, replace(CONTRACT, **{"evaluation.image_size_px": 32}), CLASSES, {})
    assert models.list() == []


def test_adapting_zeroes_the_head_and_keeps_all_other_weights(network):
    adapted = adapt(network, CONFIG, num_classes=7)
    assert adapted.head.weight.shape == (7, 16)
    assert torch.count_nonzero(adapted.head.weight) == torch.count_nonzero(adapted.head.bias) == 0
    assert adapted.pre_logits is None
    theirs = network.state_dict()
    for name, value in adapted.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, theirs[name]), name
    assert adapt(network, CONFIG, 7, head_bias_init=-2.0).head.bias.tolist() == [-2.0] * 7


def test_adapting_resamples_positions_for_another_resolution(network):
    adapted = adapt(network, replace(CONFIG, image_size_px=28, dropout_rate=0.0), num_classes=2)
    old, new = network.pos_embed.detach(), adapted.pos_embed.detach()
    assert new.shape == (1, 1 + 49, 16)
    assert torch.equal(new[:, 0], old[:, 0])  # of the class token
    corners_of = {4: (1, 4, 13, 16), 7: (1, 7, 43, 49)}
    # Aligned corners: every second point of a grid of 7 is a point of the grid of 4.
    torch.testing.assert_close(new[:, corners_of[7]], old[:, corners_of[4]])
    torch.testing.assert_close(new[:, 2], (old[:, 1] + old[:, 2]) / 2)
    assert adapted(torch.zeros(1, 3, 28, 28)).shape == (1, 2)


def test_adapting_does_not_change_the_source(network):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    adapted = adapt(network, CONFIG, num_classes=2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("field", "value"), [("embed_dim", 32), ("depth", 3), ("pool", "gap"), ("patch_size_px", 8), ("mlp_dim", 64)]
)
def test_adapting_to_another_network_is_refused_by_field(network, field, value):
    with pytest.raises(ValueError, match=f"{field}: {getattr(CONFIG, field)} -> {value}"):
        adapt(network, replace(CONFIG, **{field: value}), num_classes=2)


@pytest.mark.slow
def test_a_model_predicts_without_settings_and_with_the_base_install_and_torch_only(published, tmp_path):
    """Three lines of Python, without Ray, MLflow, Prefect, S3 or a plotting library."""
    absent = ("ray", "mlflow", "prefect", "s3fs", "boto3", "matplotlib", "timm", "transformers", "sklearn", "scipy")
    (tmp_path / "cat.png").write_bytes(noise(0, (30, 20)))
    script = f"""
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # any import of them fails
from vitline import load_model
model = load_model({published!r})
print(model.predict(["cat.png"])[0][0][0])
assert "fsspec.implementations.local" not in sys.modules
"""
    repository = str(Path(__file__).parents[2])
    bare = {"PATH": "/usr/bin:/bin", "PYTHONPATH": repository, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=bare, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in CLASSES
