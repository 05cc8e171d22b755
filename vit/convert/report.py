"""The report of a conversion, entry by entry, and the check that every entry is explained."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vitline.vit.models.build import at_resolution, meta_network, network_with
from vitline.vit.models.config import NetworkConfig, TransformerConfig
from vitline.vit.models.network import Network
from vitline.vit.models.variants import network_variant
from vitline.vit.models.vit import Transformer


class ConversionError(ValueError):
    """A file of weights cannot be read, or has unexplained entries; the message names them."""


@contextlib.contextmanager
def refusing(source: str) -> Iterator[None]:
    """Raises ConversionError for settings and entries of which no network can be built."""
    try:
        yield
    except ConversionError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise ConversionError(f"{source} does not describe a network: {error}") from error


@dataclass
class ConversionReport:
    """What became of each entry of a file, and where each of our parameters is from."""

    source: str
    family: str
    loaded: dict[str, str] = field(default_factory=dict)
    """Our parameter -> the entries of the file that it is made of."""
    adapted: list[str] = field(default_factory=list)
    """The changes that were made to weights or settings."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Entry of the file -> the reason why it is not used."""
    missing: dict[str, str] = field(default_factory=dict)
    """Our parameter -> the origin of its values, as the file has none."""

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
    """A network, and the report of its conversion."""

    network: Network
    report: ConversionReport

    @property
    def config(self) -> NetworkConfig:
        return self.network.config


def finish(
    config: NetworkConfig, num_classes: int, weights: Mapping[str, Tensor], report: ConversionReport, unused: set[str]
) -> Converted:
    """The network with these weights. Raises ConversionError naming unused entries, missing or extra parameters, different
    shapes, and values that are not finite."""
    problems = []
    expected = meta_network(config, num_classes).state_dict()
    if unused:
        problems.append(f"entries that the network does not use: {_some(unused)}")
    if missing := set(expected) - set(weights):
        problems.append(f"parameters without values in the file: {_some(missing)}")
    if stray := set(weights) - set(expected):
        problems.append(f"parameters that {config.summary} does not have: {_some(stray)}")
    for name in sorted(set(expected) & set(weights)):
        found, wanted = tuple(weights[name].shape), tuple(expected[name].shape)
        if found != wanted:
            entry = report.loaded.get(name, name)
            problems.append(f"{entry} gives {name} the shape {found}, but {config.summary} has {wanted}")
        elif not weights[name].is_meta and not weights[name].isfinite().all():
            problems.append(f"{report.loaded.get(name, name)} has values that are not finite")
    if problems:
        raise ConversionError(
            f"{report.source} ({report.family}) cannot be converted to {config.summary}: {'; '.join(problems)}. "
            "If the file is a different variant, pass that variant with --variant."
        )
    return Converted(network_with(config, num_classes, weights), report)


def resampled(network: Network, image_size_px: int | None, report: ConversionReport) -> Network:
    """The network at another resolution. The report says how its position embeddings were resampled."""
    if image_size_px in (None, network.config.image_size_px):
        return network
    moved = at_resolution(network, int(image_size_px or 0))
    before, after = (c.grid_side if isinstance(c, TransformerConfig) else 0 for c in (network.config, moved.config))
    if before != after and isinstance(moved, Transformer) and moved.config.pos_embed.startswith("learned"):
        how = moved.config.pos_embed_resample
        report.adapted.append(f"pos_embed: resampled from {before} x {before} to {after} x {after} patches ({how})")
    return moved


SIZES = {
    "architecture", "embed_dim", "depth", "num_heads", "mlp_dim", "patch_size_px", "patch_size", "stages", "width_factor"
}  # fmt: skip


def check_variant(config: NetworkConfig, variant: str, source: str) -> None:
    """Raises ConversionError naming the differences if the network found is not the requested variant."""
    found, wanted = config.model_dump(include=SIZES), network_variant(variant).model_dump(include=SIZES)
    differ = [
        f"{n}: {found.get(n)} instead of {wanted.get(n)}" for n in found | wanted if found.get(n) != wanted.get(n)
    ]
    if differ:
        raise ConversionError(
            f"{source} is not {variant}: {'; '.join(differ)}. It is {config.summary}. Omit --variant or give its file."
        )


def check_classes(found: int, asked: int | None, source: str) -> None:
    """Raises ConversionError if the head found has another number of classes than requested."""
    if asked not in (None, found):
        raise ConversionError(
            f"{source} has a head of {found} classes, not {asked}. Give one class name per class of the head."
        )


def _some(names: set[str], most: int = 6) -> str:
    shown = sorted(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
