"""Probes: protocols that score frozen features. The network itself is not trained."""

from typing import Literal

from pydantic import PositiveInt

from vitline.infra.config import FrozenConfig

Method = Literal["least-squares", "logistic", "nearest", "head"]


class Probe(FrozenConfig):
    """How the frozen features of a model are scored."""

    kind: Literal["probe"] = "probe"
    name: str
    """Name of the protocol. Few-shot scores add the number of shots, as in `fewshot-10`."""
    method: Method
    """What maps features to classes. `head` is the model's own head, for corpora with the model's classes."""
    shots: tuple[PositiveInt, ...] = ()
    """Numbers of training examples per class, which the seed draws; empty uses all examples."""


PROBES = (
    Probe(name="fewshot", method="least-squares", shots=(5, 10, 25)),
    Probe(name="linear", method="logistic"),
    Probe(name="knn", method="nearest"),
    Probe(name="head", method="head"),
)
