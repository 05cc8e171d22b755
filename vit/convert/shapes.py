"""What the entries of a file show: the sizes of its network, its classes, and the values of our parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitline.vit.convert.report import ConversionError, ConversionReport, check_classes
from vitline.vit.convert.tables import Table, names_of, numbers_of
from vitline.vit.models.build import meta_network
from vitline.vit.models.config import HybridConfig, NetworkConfig, TransformerConfig, ViTConfig
from vitline.vit.models.pos_embed import grid_side


@dataclass(frozen=True)
class Entries:
    """The entries of a file, asked for by our names."""

    state: Mapping[str, Tensor]
    """Entry -> its values, with axes in torch's order."""
    table: Table
    report: ConversionReport
    kind: str
    """What the file is expected to be, as errors say it."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Entry -> its name in the file, where it differs."""

    def has(self, ours: str) -> bool:
        return names_of(ours, self.table)[0] in self.state

    def need(self, ours: str, *dims: int) -> Tensor:
        """The first entry of one of our parameters. Raises ConversionError if it is absent or has another number of axes."""
        entry = names_of(ours, self.table)[0]
        if entry not in self.state:
            shown = ", ".join(sorted(self.state)[:5])
            raise ConversionError(
                f"{self.report.source} is not {self.kind}, or it is incomplete: it has no {entry}. "
                f"Its first entries: {shown or 'none'}."
            )
        value = self.state[entry]
        if value.ndim not in dims:
            raise ConversionError(
                f"{self.report.source}: {entry} has shape {tuple(value.shape)}, expected {dims[0]} axes."
            )
        return value

    @property
    def embed_dim(self) -> int:
        return self.need("patch_embed.weight", 4).shape[0]

    @property
    def depth(self) -> int:
        """Number of encoder blocks. Raises ConversionError for more than any network has."""
        numbers = numbers_of("blocks.#.norm1.weight", self.table, self.state, self.report)
        return 1 + max((block for (block,) in numbers), default=-1)

    @property
    def mlp_dim(self) -> int:
        return self.need("blocks.0.fc1.weight", 2).shape[0]

    @property
    def qkv_bias(self) -> bool:
        return self.has("blocks.0.attention.qkv.bias")

    @property
    def pool(self) -> str:
        return "map" if self.has("pool.probe") else "token" if self.has("cls_token") else "gap"

    @property
    def grid_side(self) -> int | None:
        """Number of patches along one side; None without position embeddings."""
        if not self.has("pos_embed"):
            return None
        entry, shape = names_of("pos_embed", self.table)[0], tuple(self.need("pos_embed", 3).shape)
        try:
            side, prefix = grid_side(shape[1])
        except ValueError as error:
            raise ConversionError(f"{self.report.source}: {entry} has shape {shape}. {error}") from error
        if prefix and self.pool != "token":
            raise ConversionError(
                f"{self.report.source}: {entry} has an entry for a class token, but there is no "
                f"{names_of('cls_token', self.table)[0]}."
            )
        return side

    def resnet(self, prefix: str) -> dict[str, Any]:
        """`stages` and `width_factor` of the ResNet whose modules have this prefix."""
        blocks: dict[int, int] = {}
        line = f"{prefix}stages.#.#.conv1.weight"
        for stage, block in numbers_of(line, self.table, self.state, self.report):
            blocks[stage] = max(blocks.get(stage, 0), block + 1)
        stages = tuple(blocks.get(stage, 0) for stage in range(1 + max(blocks, default=-1)))
        root = self.need(f"{prefix}conv_root.weight", 4)
        return {"stages": stages, "width_factor": max(1, root.shape[0] // 64)}

    def transformer(self, image_size_px: int | None, **settings: Any) -> TransformerConfig:
        """The Vision Transformer or hybrid, with `settings` that no entry shows.

        Position embeddings for another grid than that of `image_size_px` decide the resolution, and the report says so.
        """
        patch = self.need("patch_embed.weight", 4).shape[2]
        settings |= {"embed_dim": self.embed_dim, "depth": self.depth, "mlp_dim": self.mlp_dim}
        settings |= {"pool": self.pool, "qkv_bias": self.qkv_bias}
        kind: type[TransformerConfig] = ViTConfig
        pixels, side = patch, self.grid_side
        if self.has("resnet.conv_root.weight"):
            kind, resnet = HybridConfig, self.resnet("resnet.")
            settings |= resnet | {"patch_size": patch}
            pixels *= HybridConfig.model_construct(stages=resnet["stages"]).stride
        else:
            settings["patch_size_px"] = patch
        config = kind(image_size_px=image_size_px or (side * pixels if side else 224), **settings)
        if side is not None and config.grid_side != side:
            self.report.adapted.append(
                f"image_size_px: {side * pixels}, which the position embeddings are for, instead of {image_size_px} in the "
                "config"
            )
            config = kind(image_size_px=side * pixels, **settings)
        return config

    def classes(self, asked: int | None) -> int:
        """Number of classes of the head, or `asked` without a head. Raises ConversionError if both differ or are absent."""
        if self.has("head.weight"):
            found = len(self.need("head.weight", 2, 4))
            check_classes(found, asked, self.report.source)
            return found
        if asked is None:
            raise ConversionError(
                f"{self.report.source} has no head. Give class names with --classes FILE (in Python: num_classes) "
                "for a new head."
            )
        return asked

    def take(self, config: NetworkConfig, num_classes: int) -> tuple[dict[str, Tensor], set[str]]:
        """(our parameters, unused entries as the file names them), with a head of zeros for a file without a head.

        A parameter with missing entries is left out; `finish` reports it.
        """
        weights: dict[str, Tensor] = {}
        unused = set(self.state)
        expected = meta_network(config, num_classes).state_dict()
        for name in expected:
            sources = names_of(name, self.table)
            if all(source in self.state for source in sources):
                weights[name] = self._joined(sources)
                self.report.loaded[name] = ", ".join(map(self._as_written, sources))
                unused.difference_update(sources)
        if not self.has("head.weight"):
            zeros = {n: torch.zeros(expected[n].shape) for n in ("head.weight", "head.bias") if n not in weights}
            self.report.missing |= dict.fromkeys(zeros, "zeros: the file has no head")
            weights |= zeros
        elif weights["head.weight"].ndim == 4:  # the head of a BiT ResNet is a 1 x 1 convolution
            weights["head.weight"] = weights["head.weight"].flatten(1)
        return weights, set(map(self._as_written, unused))

    def add_class_position(self, weights: dict[str, Tensor], config: TransformerConfig) -> None:
        """Puts a zero in front of position embeddings that are added before the class token."""
        table = weights.get("pos_embed")
        if table is not None and config.pool == "token" and table.shape[1] == config.num_patches:
            self.report.adapted.append("pos_embed: a zero entry for the class token was added at the front")
            weights["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)

    def _joined(self, sources: list[str]) -> Tensor:
        parts = [self._widened(self.state[source]) for source in sources]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(f"{source} {tuple(self.state[source].shape)}" for source in sources)
            raise ConversionError(f"{self.report.source}: the shapes do not fit together: {shapes}.")
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def _widened(self, value: Tensor) -> Tensor:
        """Half precision converted to float32, in which our networks are stored."""
        if value.dtype in (torch.float32, torch.float64):
            return value
        kind = str(value.dtype).removeprefix("torch.")
        if (note := f"{kind} became float32") not in self.report.adapted:
            self.report.adapted.append(note)
        return value.float()

    def _as_written(self, entry: str) -> str:
        return self.written.get(entry, entry)
