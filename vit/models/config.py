"""Configs of the networks. Imports no torch, so forms, plans and flows can validate a config on any machine."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Discriminator, Field, NonNegativeInt, PositiveFloat, PositiveInt, Tag, TypeAdapter, model_validator

from vitline.infra.config import FrozenConfig
from vitline.vit.models.user_code import REFERENCE

TAGS = ("vit", "hybrid", "bit", "own")
N = TypeVar("N", bound="NetworkConfig")
# Settings that may differ from those of the weights that a training starts from: they have no weights but the head's, or weights
# that can be resampled.
ADAPTABLE = {
    "image_size_px", "pre_logits", "head_bias_init", "dropout_rate", "stochastic_depth_rate", "pos_embed_resample",
    "feature_flop",
}  # fmt: skip

ResampleMethod = Literal["bilinear-align-corners", "bilinear", "bicubic", "bicubic-antialias"]

ActivationCheckpointing = Literal["none", "selective", "full"]
"""What is computed again in the backward pass, see `recompute.py`."""
Frozen = Literal["none", "embeddings", "backbone"] | PositiveInt
"""What is not trained, see `vit/training/layers.py`: all that is before the first block, as many of the first blocks as a number says with
it, or all but the head."""


class NetworkConfig(FrozenConfig):
    """The settings that all networks have."""

    architecture: str
    """Kind of network."""
    image_size_px: PositiveInt = 224
    """Side of the square input, in pixels."""
    head_bias_init: float = 0.0
    """Initial bias of the head: 0 for softmax, -10 for sigmoid on 21k classes."""

    @property
    def is_stochastic(self) -> bool:
        """True if a training step draws random numbers."""
        return False

    @property
    def num_blocks(self) -> int:
        """Number of blocks between its stem and its head (`vit/training/layers.py`); 0 where that is not known."""
        return 0

    @property
    @abstractmethod
    def summary(self) -> str:
        """A phrase that describes the network."""

    def for_transfer(self: N, image_size_px: int | None = None, head_bias_init: float = 0.0) -> N:
        """The config for fine-tuning on another task: at this resolution, with a new linear head and no pre-logits layer."""
        changes: dict[str, Any] = {"image_size_px": image_size_px or self.image_size_px}
        return type(self).model_validate(self.model_dump() | changes | {"head_bias_init": head_bias_init})


class TransformerConfig(NetworkConfig):
    """A Vision Transformer without its stem: encoder, pooling, head (arXiv:2010.11929, Sec. 3.1, Table 1)."""

    embed_dim: PositiveInt = 768
    """Width of a token (D)."""
    depth: PositiveInt = 12
    """Number of encoder blocks (L)."""
    num_heads: PositiveInt = 12
    """Number of attention heads; must divide embed_dim."""
    mlp_dim: PositiveInt = 3072
    """Hidden width of the MLP."""
    pool: Literal["token", "gap", "map"] = "token"
    """How tokens become one vector: `token` takes the class token (as in the paper), `gap` the mean over the patch tokens,
    `map` attends to them with a learned query (big_vision)."""
    pre_logits: bool = False
    """Add a tanh layer before the head, as in the paper's pre-training. Fine-tuning drops it."""
    pos_embed: Literal["learned-1d", "learned-2d", "relative", "sincos-2d", "none"] = "learned-1d"
    """Position embeddings (paper, App. D.4). `sincos-2d` is fixed, as in "Better plain ViT baselines"."""
    pos_embed_at: Literal["stem", "every-layer", "shared"] = "stem"
    """Where position embeddings are added: `stem` once before the encoder, `every-layer` before each block from a table of
    its own, `shared` before each block from one table."""
    pos_embed_resample: ResampleMethod = "bilinear-align-corners"
    """How learned position embeddings are resampled to another grid; the default does as the paper's code."""
    dropout_rate: float = Field(0.0, ge=0, lt=1)
    """Dropout after the position embeddings, the attention outputs and both MLP layers."""
    stochastic_depth_rate: float = Field(0.0, ge=0, lt=1)
    """Probability that an example skips the branches of the last block. It grows linearly from 0 at the first block."""
    qkv_bias: bool = True
    """Use a bias in the query, key and value projections."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """GELU with the tanh approximation of the paper's code, or exact (`erf`) as in timm and Hugging Face."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of LayerNorm; 1e-12 in Hugging Face's ViT."""

    @model_validator(mode="after")
    def _check_encoder(self) -> Self:
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide embed_dim={self.embed_dim}.")
        divisor = {"learned-2d": 2, "sincos-2d": 4}.get(self.pos_embed, 1)
        if self.embed_dim % divisor:
            raise ValueError(
                f"pos_embed={self.pos_embed} needs an embed_dim divisible by {divisor}, not {self.embed_dim}."
            )
        if self.pos_embed in ("relative", "none") and self.pos_embed_at != "stem":
            raise ValueError(
                f"pos_embed_at={self.pos_embed_at} has no effect with pos_embed={self.pos_embed}, which adds nothing to the "
                "tokens. Leave it out."
            )
        return self

    @property
    def is_stochastic(self) -> bool:
        return bool(self.dropout_rate or self.stochastic_depth_rate)

    @property
    def num_blocks(self) -> int:
        return self.depth

    @property
    @abstractmethod
    def grid_side(self) -> int:
        """Number of patches along one side of the image."""

    @property
    def _sizes(self) -> str:
        return f"width {self.embed_dim}, depth {self.depth}, {self.num_heads} heads, images of {self.image_size_px} px"

    @property
    def num_patches(self) -> int:
        return self.grid_side**2

    @property
    def num_tokens(self) -> int:
        """Number of tokens (T): the patches, and the class token if there is one."""
        return self.num_patches + (self.pool == "token")

    def for_transfer(self: N, image_size_px: int | None = None, head_bias_init: float = 0.0) -> N:
        moved = super().for_transfer(image_size_px, head_bias_init)
        return type(self).model_validate(moved.model_dump() | {"pre_logits": False})


PatchTarget = Literal["mean-color-3bit", "downsized-4x4-3bit", "pixels-l2"]
"""What masked patch prediction predicts of a patch (`vit/models/masked_patches.py`)."""


class ViTConfig(TransformerConfig):
    """A Vision Transformer on patches of pixels (arXiv:2010.11929, Sec. 3.1)."""

    architecture: Literal["vit"] = "vit"
    """Kind of network."""
    patch_size_px: PositiveInt = 16
    """Side of a patch, in pixels. Pixels that fill no whole patch are dropped, as by the VALID convolution of the paper's
    code."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.image_size_px < self.patch_size_px:
            raise ValueError(f"image_size_px={self.image_size_px} must be at least patch_size_px={self.patch_size_px}.")
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
    """Kind of network."""
    stages: tuple[PositiveInt, ...] = (3, 4, 9)
    """Number of bottleneck blocks of each ResNet stage; empty for the stem only. (3, 4, 9) is ResNet-50 with the blocks of
    its last stage moved into the third, at stride 16; (3, 4, 6, 3) is the whole ResNet-50, at stride 32."""
    width_factor: PositiveInt = 1
    """Multiple of the ResNet's 64 channels; 1 in every hybrid of the paper."""
    patch_size: PositiveInt = 1
    """Side of a patch, in pixels of the feature map."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.feature_side < self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} must be at most {self.feature_side}, the side of the feature map for "
                f"image_size_px={self.image_size_px}."
            )
        return self

    @property
    def stride(self) -> int:
        """Pixels of the image per pixel of the feature map."""
        stride: int = 4 * 2 ** max(0, len(self.stages) - 1)
        return stride

    @property
    def feature_side(self) -> int:
        """Side of the ResNet's output, rounded up by SAME padding."""
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
    """Kind of network."""
    stages: tuple[PositiveInt, ...] = (3, 4, 6, 3)
    """Number of bottleneck blocks of each stage."""
    width_factor: PositiveInt = 1
    """Multiple of the 64 channels of the stem."""

    @property
    def num_blocks(self) -> int:
        return sum(self.stages)

    @property
    def summary(self) -> str:
        blocks = "-".join(map(str, self.stages))
        return f"a BiT ResNet: blocks {blocks}, width x{self.width_factor}, images of {self.image_size_px} px"


class UserNetworkConfig(NetworkConfig):
    """A user-defined network: a subclass of `vitline.vit.models.network.Network`."""

    architecture: Literal["own"] = "own"
    """Kind of network."""
    network: str = Field(pattern=REFERENCE)
    """What builds it, as PACKAGE.MODULE:NAME: a class or function of (config, num_classes)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its own settings: JSON values by name."""
    source: str = ""
    """Digest of the Python files of the package. It is filled in when a training is planned."""
    embed_dim: NonNegativeInt = 0
    """Width of the features. It is filled in when a training is planned."""
    feature_flop: NonNegativeInt = 0
    """FLOPs from one image to its features. They are counted when a training is planned; for a transfer at another size they are
    multiplied by the ratio of the pixels."""

    @property
    def is_stochastic(self) -> bool:
        return True

    @property
    def summary(self) -> str:
        return f"a user-defined network, {self.network}, for images of {self.image_size_px} px"

    def for_transfer(self: N, image_size_px: int | None = None, head_bias_init: float = 0.0) -> N:
        moved = super().for_transfer(image_size_px, head_bias_init)
        assert isinstance(self, UserNetworkConfig)
        scaled = round(self.feature_flop * (moved.image_size_px / self.image_size_px) ** 2)
        return type(self).model_validate(moved.model_dump() | {"feature_flop": scaled})


def _architecture(value: Any) -> str | None:
    """The architecture of a config; a config without one is a Vision Transformer."""
    return value.get("architecture", "vit") if isinstance(value, dict) else getattr(value, "architecture", None)


AnyNetworkConfig = Annotated[
    Annotated[ViTConfig, Tag("vit")]
    | Annotated[HybridConfig, Tag("hybrid")]
    | Annotated[BiTConfig, Tag("bit")]
    | Annotated[UserNetworkConfig, Tag("own")],
    Discriminator(_architecture),
]
_ANY: TypeAdapter[ViTConfig | HybridConfig | BiTConfig | UserNetworkConfig] = TypeAdapter(AnyNetworkConfig)


def network_config(tree: Any) -> ViTConfig | HybridConfig | BiTConfig | UserNetworkConfig:
    """The network config from JSON data or from a config of any architecture. Raises ValueError naming the field."""
    return _ANY.validate_python(tree)


def check_same_network(source: NetworkConfig, config: NetworkConfig, use: str) -> None:
    """Raises ValueError naming each setting in which a pre-trained network differs and that other weights cannot have."""
    theirs, ours = source.model_dump(exclude=ADAPTABLE), config.model_dump(exclude=ADAPTABLE)
    differ = [key for key in theirs | ours if theirs.get(key) != ours.get(key)]
    if "architecture" in differ:
        differ = ["architecture"]  # the others are those of another kind of network
    if differ:
        changed = "; ".join(f"{key}: {theirs.get(key)} -> {ours.get(key)}" for key in differ)
        raise ValueError(
            f"The pre-trained network cannot be {use} the requested one: {changed}. "
            "Request the settings of the pre-trained network."
        )


def field_path(loc: Sequence[str | int]) -> str:
    """The dotted path of a field in a validation error, as an override names it: without the architecture's tag."""
    shown = [
        part
        for before, part in zip((None, *loc), loc, strict=False)
        if not (part in TAGS and before in ("model", "architecture"))
    ]
    return ".".join(map(str, shown))
