"""Protocols on frozen features: the network is not trained, only what reads its features is (DESIGN 3.7)."""

from typing import Literal

from pydantic import PositiveInt

from infra.config import FrozenConfig

Method = Literal["least-squares", "logistic", "nearest", "head"]


class Probe(FrozenConfig):
    """How a model is scored without training it."""

    kind: Literal["probe"] = "probe"
    name: str
    """Name of the protocol; scores of few shots carry their number as well, as in `fewshot-10`."""
    method: Method
    """What maps features to classes; `head` is the model's own, for a corpus of its classes."""
    shots: tuple[PositiveInt, ...] = ()
    """Training examples a class, drawn by the seed; none takes all."""


PROBES = (
    Probe(name="fewshot", method="least-squares", shots=(5, 10, 25)),
    Probe(name="linear", method="logistic"),
    Probe(name="knn", method="nearest"),
    Probe(name="head", method="head"),
)
