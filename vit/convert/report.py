"""What a conversion did, entry by entry, and the check that nothing is left unexplained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vit.models.build import meta_network, network_with
from vit.models.config import NetworkConfig
from vit.models.network import Network
from vit.models.variants import network_variant


class ConversionError(ValueError):
    """A file of weights that cannot be read, or that holds something unexplained; the text names the entries."""


@dataclass
class ConversionReport:
    """`loaded`: our parameter -> the entries of the file it is made of; `adapted`: what was changed on the way, in
    sentences; `skipped`: entry of the file -> why it has no place here; `missing`: our parameter -> where its values come
    from, as the file has none."""

    source: str
    family: str
    loaded: dict[str, str] = field(default_factory=dict)
    adapted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "family": self.family,
            "loaded": dict(self.loaded),
            "adapted": list(self.adapted),
            "skipped": dict(self.skipped),
            "missing": dict(self.missing),
        }


@dataclass(frozen=True)
class Converted:
    """A network with the report of where its weights came from."""

    network: Network
    report: ConversionReport

    @property
    def config(self) -> NetworkConfig:
        return self.network.config


def finish(
    config: NetworkConfig, num_classes: int, weights: Mapping[str, Tensor], report: ConversionReport, unused: set[str]
) -> Converted:
    """The network of `weights`. Raises ConversionError for entries nobody used, parameters nobody filled, and shapes
    that differ, each by name."""
    problems = []
    expected = meta_network(config, num_classes).state_dict()
    if unused:
        problems.append(f"entries that no part of the network takes: {_some(unused)}")
    if missing := set(expected) - set(weights):
        problems.append(f"parameters that the file has no values for: {_some(missing)}")
    if stray := set(weights) - set(expected):
        problems.append(f"parameters that {config.summary} does not have: {_some(stray)}")
    for name in sorted(set(expected) & set(weights)):
        found, wanted = tuple(weights[name].shape), tuple(expected[name].shape)
        if found != wanted:
            entry = report.loaded.get(name, name)
            problems.append(f"{entry} gives {name} the shape {found}, {config.summary} has {wanted}")
        elif not weights[name].is_meta and not weights[name].isfinite().all():
            problems.append(f"{report.loaded.get(name, name)} holds numbers that are not finite")
    if problems:
        raise ConversionError(
            f"{report.source} ({report.family}) does not become {config.summary}: {'; '.join(problems)}. "
            "If the file is another variant than was asked for or found, name it."
        )
    return Converted(network_with(config, num_classes, weights), report)


SIZES = {
    "architecture", "embed_dim", "depth", "num_heads", "mlp_dim", "patch_size_px", "patch_size", "stages", "width_factor"
}  # fmt: skip


def check_variant(config: NetworkConfig, variant: str, source: str) -> None:
    """Raises ConversionError, naming sizes, where what was found is not the variant that was asked for."""
    found, wanted = config.model_dump(include=SIZES), network_variant(variant).model_dump(include=SIZES)
    differ = [
        f"{n}: {found.get(n)} instead of {wanted.get(n)}" for n in found | wanted if found.get(n) != wanted.get(n)
    ]
    if differ:
        raise ConversionError(f"{source} is not {variant}: {'; '.join(differ)}. It is {config.summary}.")


def _some(names: set[str], most: int = 6) -> str:
    shown = sorted(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
