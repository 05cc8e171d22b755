"""Configs of the networks. Imports no torch, so that a form, a plan or a flow can validate one on any machine."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, TypeAdapter, model_validator

from infra.config import FrozenConfig

TAGS = ("vit", "hybrid", "bit")
N = TypeVar("N", bound="NetworkConfig")

ResampleMethod = Literal["bilinear-align-corners", "bilinear", "bicubic", "bicubic-antialias"]


class NetworkConfig(FrozenConfig):
    """What every network has."""

    architecture: str
    """Which network this is."""
    image_size_px: PositiveInt = 224
    """Side of the square input."""
    head_bias_init: float = 0.0
    """Initial bias of the head: 0 for softmax, -10 for sigmoid on 21k classes."""

    @property
    def is_stochastic(self) -> bool:
        """Whether a training step draws random numbers."""
        return False

    @property
    @abstractmethod
    def summary(self) -> str:
        """The network in one phrase."""

    def for_transfer(self: N, image_size_px: int | None = None, head_bias_init: float = 0.0) -> N:
        """This network made ready for another task: at that resolution, with a fresh linear head and nothing before it."""
        changes: dict[str, Any] = {"image_size_px": image_size_px or self.image_size_px}
        return type(self).model_validate(self.model_dump() | changes | {"head_bias_init": head_bias_init})


class TransformerConfig(NetworkConfig):
    """A Vision Transformer after its stem: encoder, pooling, head (arXiv:2010.11929, Sec. 3.1, Table 1)."""

    embed_dim: PositiveInt = 768
    """Width of a token (D)."""
    depth: PositiveInt = 12
    """Number of encoder blocks (L)."""
    num_heads: PositiveInt = 12
    """Attention heads; must divide embed_dim."""
    mlp_dim: PositiveInt = 3072
    """Hidden width of the MLP."""
    pool: Literal["token", "gap", "map"] = "token"
    """Class token (the paper's default), mean over the patch tokens, or attention with a learned query (big_vision)."""
    pre_logits: bool = False
    """A tanh layer before the head, as the paper pre-trains; dropped at fine-tuning."""
    pos_embed: Literal["learned-1d", "learned-2d", "relative", "sincos-2d", "none"] = "learned-1d"
    """Position embeddings (paper, App. D.4); sincos-2d is fixed, as in "Better plain ViT baselines"."""
    pos_embed_at: Literal["stem", "every-layer", "shared"] = "stem"
    """Added once before the encoder, to every block's input from a table of its own, or from one table for all."""
    pos_embed_resample: ResampleMethod = "bilinear-align-corners"
    """How learned positions move to another grid; the default is the original's."""
    dropout_rate: float = Field(0.0, ge=0, lt=1)
    """After the position embeddings, attention outputs and both MLP layers."""
    stochastic_depth_rate: float = Field(0.0, ge=0, lt=1)
    """Chance that the last block's branches are skipped for an example; grows linearly from 0 at the first block."""
    qkv_bias: bool = True
    """Bias of the query, key and value projections."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """The original's tanh approximation, or the exact function that timm and Hugging Face train with."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of LayerNorm; Hugging Face's ViT has 1e-12."""

    @model_validator(mode="after")
    def _check_encoder(self) -> Self:
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide embed_dim={self.embed_dim}.")
        divisor = {"learned-2d": 2, "sincos-2d": 4}.get(self.pos_embed, 1)
        if self.embed_dim % divisor:
            raise ValueError(f"pos_embed={self.pos_embed} needs an embed_dim divisible by {divisor}: {self.embed_dim}.")
        if self.pos_embed in ("relative", "none") and self.pos_embed_at != "stem":
            raise ValueError(
                f"pos_embed={self.pos_embed} is not added to tokens; pos_embed_at={self.pos_embed_at} means nothing then."
            )
        return self

    @property
    def is_stochastic(self) -> bool:
        return bool(self.dropout_rate or self.stochastic_depth_rate)

    @property
    @abstractmethod
    def grid_side(self) -> int:
        """Patches along one side of the image."""

    @property
    def _sizes(self) -> str:
        return f"width {self.embed_dim}, depth {self.depth}, {self.num_heads} heads, images of {self.image_size_px} px"

    @property
    def num_patches(self) -> int:
        return self.grid_side**2

    @property
    def num_tokens(self) -> int:
        """T: the patches, and the class token where there is one."""
        return self.num_patches + (self.pool == "token")

    def for_transfer(self: N, image_size_px: int | None = None, head_bias_init: float = 0.0) -> N:
        moved = super().for_transfer(image_size_px, head_bias_init)
        return type(self).model_validate(moved.model_dump() | {"pre_logits": False})


class ViTConfig(TransformerConfig):
    """A Vision Transformer on patches of pixels (arXiv:2010.11929, Sec. 3.1)."""

    architecture: Literal["vit"] = "vit"
    """Which network this is."""
    patch_size_px: PositiveInt = 16
    """Side of a patch. A remainder of the image is dropped, as the original's VALID convolution does."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.image_size_px < self.patch_size_px:
            raise ValueError(f"image_size_px={self.image_size_px} is less than patch_size_px={self.patch_size_px}.")
        return self

    @property
    def grid_side(self) -> int:
        return self.image_size_px // self.patch_size_px

    @property
    def summary(self) -> str:
        return f"a Vision Transformer of {self._sizes} in patches of {self.patch_size_px} px"


class HybridConfig(TransformerConfig):
    """A Vision Transformer on the feature map of a ResNet (arXiv:2010.11929, Sec. 3.1 and 4.1)."""

    architecture: Literal["hybrid"] = "hybrid"
    """Which network this is."""
    stages: tuple[PositiveInt, ...] = (3, 4, 9)
    """Bottleneck blocks of each ResNet stage; none is the stem alone. (3, 4, 9) is ResNet-50 with its last stage moved
    into the third, at stride 16; (3, 4, 6, 3) is the whole of it, at stride 32."""
    width_factor: PositiveInt = 1
    """Multiple of the ResNet's 64 channels; 1 in every hybrid of the paper."""
    patch_size: PositiveInt = 1
    """Side of a patch in pixels of the feature map."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.feature_side < self.patch_size:
            raise ValueError(
                f"image_size_px={self.image_size_px} gives a feature map of {self.feature_side} px; "
                f"patch_size={self.patch_size} is larger."
            )
        return self

    @property
    def stride(self) -> int:
        """Pixels of the image per pixel of the feature map."""
        return 4 * 2 ** max(0, len(self.stages) - 1)

    @property
    def feature_side(self) -> int:
        """Side of the ResNet's output; SAME padding rounds up."""
        return -(-self.image_size_px // self.stride)

    @property
    def grid_side(self) -> int:
        return self.feature_side // self.patch_size

    @property
    def summary(self) -> str:
        blocks = f"ResNet blocks {'-'.join(map(str, self.stages))}" if self.stages else "a ResNet's stem"
        return f"a hybrid: {blocks}, then a Vision Transformer of {self._sizes}"


class BiTConfig(NetworkConfig):
    """A BiT ResNet: v2 blocks, weight standardisation, GroupNorm (arXiv:1912.11370; arXiv:2010.11929, Sec. 4.1)."""

    architecture: Literal["bit"] = "bit"
    """Which network this is."""
    stages: tuple[PositiveInt, ...] = (3, 4, 6, 3)
    """Bottleneck blocks of each stage."""
    width_factor: PositiveInt = 1
    """Multiple of the 64 channels of the stem."""

    @property
    def summary(self) -> str:
        blocks = "-".join(map(str, self.stages))
        return f"a BiT ResNet: blocks {blocks}, width x{self.width_factor}, images of {self.image_size_px} px"


def _architecture(value: Any) -> str | None:
    """The tag of a config; one without it is a Vision Transformer."""
    return value.get("architecture", "vit") if isinstance(value, dict) else getattr(value, "architecture", None)


AnyNetworkConfig = Annotated[
    Annotated[ViTConfig, Tag("vit")] | Annotated[HybridConfig, Tag("hybrid")] | Annotated[BiTConfig, Tag("bit")],
    Discriminator(_architecture),
]
_ANY: TypeAdapter[Any] = TypeAdapter(AnyNetworkConfig)


def network_config(tree: Any) -> ViTConfig | HybridConfig | BiTConfig:
    """The config that JSON or a config of some architecture stands for. Raises ValueError naming the field."""
    return _ANY.validate_python(tree)


def field_path(loc: Sequence[str | int]) -> str:
    """The dotted path of a field in a validation error, as people write it: without the architecture's tag."""
    shown = [
        part
        for before, part in zip((None, *loc), loc, strict=False)
        if not (part in TAGS and before in ("model", "architecture"))
    ]
    return ".".join(map(str, shown))
