"""Named protocols: each fixes resolution, resize, settings and how one of them is chosen (DESIGN 3.7).

A protocol turns (architecture, seed) into the settings to try, each a whole TrainRecipe. It never looks at the task:
VTAB allows no task-dependent logic.
"""

from infra.config import FrozenConfig, digest_of
from vit.config import InputConfig, OptimConfig, TrainRecipe
from vit.input.config import AugmentConfig
from vit.models.config import NetworkConfig, network_config


class Protocol(FrozenConfig):
    """How a model is fine-tuned on 1,000 examples: SGD with momentum 0.9, cosine, clip 1, no weight decay."""

    name: str
    image_size_px: int | None
    """Input side; none keeps the model's own."""
    learning_rates: tuple[float, ...]
    """Settings to choose from on the 200 validation examples."""
    total_steps: int
    warmup_steps: int
    global_batch_size: int
    num_lanes: int
    augment: AugmentConfig
    """Crop, flip and resize; its resolution is replaced by the protocol's or the model's."""

    @property
    def digest(self) -> str:
        return digest_of(self)

    def settings(self, model: NetworkConfig, seed: int) -> tuple[TrainRecipe, ...]:
        """One recipe per setting, for a network of this architecture."""
        size = self.image_size_px or model.image_size_px
        network = network_config(model.for_transfer(size))
        augment = AugmentConfig.model_validate(self.augment.model_dump() | {"image_size_px": size})
        data = InputConfig(
            global_batch_size=self.global_batch_size, num_lanes=self.num_lanes, shuffle_window=4, augment=augment
        )
        return tuple(
            TrainRecipe(
                model=network,
                input=data,
                optim=OptimConfig(optimizer="sgd", peak_lr=lr, warmup_steps=self.warmup_steps, schedule="cosine"),
                total_steps=self.total_steps,
                seed=seed,
            )
            for lr in self.learning_rates
        )


# arXiv:2010.11929, Sec. B.1.1 and Table 4: one setting for all 19 tasks. The warmup is that of the authors' later code;
# the paper states none. Resizing as the originals: straight to the square in evaluation, without antialias.
VIT_PAPER = Protocol(
    name="vit-paper",
    image_size_px=384,
    learning_rates=(0.01,),
    total_steps=2500,
    warmup_steps=200,
    global_batch_size=512,
    num_lanes=64,
    augment=AugmentConfig(image_size_px=384, train_crop="inception", flip=True, antialias=False),
)


def protocol_named(name: str) -> Protocol:
    """Raises ValueError that lists the protocols there are."""
    from vit.recipes import emoji

    known = {protocol.name: protocol for protocol in (VIT_PAPER, emoji.protocol())}
    if name not in known:
        raise ValueError(f"There is no protocol {name!r}; there are: {', '.join(known)}.")
    return known[name]
