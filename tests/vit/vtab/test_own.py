"""User-defined protocols: what a function or a file makes, the name of their scores, and what is refused in one sentence."""

import re
import sys

import pytest

from vitline.infra.config import replace
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.evaluation.protocols import over_seeds, protocol_named

FILE = """
base: vit-paper
protocol:
  learning_rates: [1e-3, 3e-3]
  total_steps: 2000
  augment: {flip: false}
  optim: {optimizer: adamw, weight_decay: 0.05, layer_decay: 0.75, head_first_steps: 300}
"""
MODULE = """
from vitline.infra.config import replace
from vitline.vit.evaluation.protocols import protocol_named

def mine():
    return replace(protocol_named("vit-paper"), name="mine", total_steps=2000)

def same_name():
    return replace(protocol_named("vit-paper"), total_steps=2000)

def median():
    return replace(protocol_named("bit-hyperrule"), name="median")

def probe():
    return protocol_named("linear")

def fails():
    raise KeyError("birds")
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="My protocol.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module `own_protocols` in the current folder."""
    (tmp_path / "own_protocols.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_protocols", None)


def test_a_file_changes_a_protocol_of_vitline(file):
    found, base = protocol_of(file(FILE)), protocol_named("vit-paper")
    changed = {"optimizer": "adamw", "weight_decay": 0.05, "layer_decay": 0.75, "head_first_steps": 300}
    expected = replace(
        base, name=found.name, learning_rates=(1e-3, 3e-3), total_steps=(2000,),
        **{"augment.flip": False}, **{f"optim.{name}": value for name, value in changed.items()},
    )  # fmt: skip
    assert found == expected
    assert re.fullmatch("own-my-protocol-[0-9a-f]{6}", found.name)


def test_the_name_of_scores_follows_from_name_and_content(file, module):
    name = protocol_of(file(FILE)).name
    assert protocol_of(file(FILE, "my_protocol.yml")).name == name
    assert protocol_of(file(FILE.replace("0.75", "0.8"))).name != name
    assert protocol_of(file(FILE.replace("protocol:", "protocol:\n  name: birds"))).name.startswith("own-birds-")
    of_function = protocol_of("own_protocols:mine")
    assert of_function == protocol_of(file("base: vit-paper\nprotocol: {name: mine, total_steps: 2000}\n"))
    assert protocol_of("vit-paper") == protocol_named("vit-paper")


def test_the_name_of_scores_changes_with_the_code_of_an_optimizer(file, module, tmp_path, monkeypatch):
    text = "base: vit-paper\nprotocol: {optim: {optimizer: 'own_protocols:Muon', optimizer_options: {steps: 3}}}\n"
    with pytest.raises(ValueError, match=r"The optimizer 'own_protocols:Muon' is Python code of .* Add the package"):
        protocol_of(file(text))
    monkeypatch.setenv("VITLINE_RECIPE_PACKAGES", "own_protocols")
    before = protocol_of(file(text))
    assert (before.optim.optimizer_options, len(before.optim.optimizer_source)) == ({"steps": 3}, 64)
    (tmp_path / "own_protocols.py").write_text(f"{MODULE}#")
    assert protocol_of(file(text)).name != before.name
    assert protocol_of(file(text.replace("own_protocols", "torch.optim"))).optim.optimizer_source == ""


def test_seeds_are_combined_by_their_mean_as_reports_do(file):
    protocol = protocol_of(file("base: bit-hyperrule\n"))
    assert (protocol.seed_statistic, over_seeds(protocol.name, (0.1, 0.2, 0.9))) == ("mean", pytest.approx(0.4))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- 1\n", "mine.yaml holds no mapping; a protocol has the keys `base`, `protocol`"),
        ("base: vit-paper\nrecipe: {}\n", "mine.yaml .line 2. has the key 'recipe'; a protocol has `base`, `protocol`"),
        ("protocol: {total_steps: 5}\n", "mine.yaml starts from base=None, which is no fine-tuning protocol; available: small-"),
        ("base: vit-papers\n", "starts from base='vit-papers', which is no fine-tuning protocol; .* Did you mean 'vit-paper'?"),
        ("base: linear\n", "mine.yaml starts from base='linear', which is no fine-tuning protocol"),
        ("base: vit-paper\nprotocol: 5\n", "mine.yaml: protocol=5 must be a mapping of fields"),
        ("base: vit-paper\nprotocol: {steps: 5}\n", "mine.yaml: .*has no field 'steps'; available fields"),
        ("base: vit-paper\nprotocol: {optim: {layers: 5}}\n", "mine.yaml: .* has no field 'optim.layers'; available fields"),
        ("base: vit-paper\nprotocol: {1: 5}\n", "mine.yaml: .* has no field '1'"),
        (
            "base: vit-paper\nprotocol: {optim: {layer_decay: 2}}\n",
            r"mine.yaml: optim.layer_decay: Input should be less than or equal to 1, not 2\.",
        ),
        ("base: vit-paper\nprotocol: {splits: 2k}\n", r"mine.yaml: splits: Input should be '1k' or 'full', not '2k'\."),
        ("base: vit-paper\nprotocol: {total_steps: 50}\n", "mine.yaml: its content: warmup_steps=200 must be less than total_steps=50"),
        ("base: vit-paper\nprotocol: {name: vit-paper}\n", "mine.yaml: name='vit-paper' is a protocol of vitline. Give yours another"),
        ("base: vit-paper\nprotocol: {name: a/b}\n", "mine.yaml: name='a/b' must be up to 40 lower case letters"),
        ("base: vit-paper\nprotocol: {seed_statistic: median}\n", "mine.yaml: seed_statistic='median' must be 'mean'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_protocol_is_refused(file, text, error):
    with pytest.raises(ValueError, match=error):
        protocol_of(file(text, "mine.yaml"))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mine.yaml", r"There is no protocol 'mine.yaml': no such file\."),
        ("mine", "There is no protocol 'mine'; available: small-images"),
        ("./mine", "There is no protocol './mine'. One of your own is PACKAGE.MODULE:FUNCTION, or a file"),
        ("own_protocols:mime", "own_protocols has no function 'mime'. Did you mean 'mine'?"),
        ("own_protocols:fails", "The protocol 'own_protocols:fails' failed: KeyError: 'birds'"),
        ("own_protocols:probe", "The protocol 'own_protocols:probe' returned Probe. It must return a Protocol of vitline"),
        ("own_protocols:same_name", "own_protocols:same_name: name='vit-paper' is a protocol of vitline"),
        ("own_protocols:median", "own_protocols:median: seed_statistic='median' must be 'mean'"),
    ],
)  # fmt: skip
def test_what_is_no_function_that_returns_a_protocol_is_refused(module, name, error):
    with pytest.raises(ValueError, match=error):
        protocol_of(name)
