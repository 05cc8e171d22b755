"""What a nightly pipeline says of its nights, by overrides that begin with `nights.`."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from vitline.infra.config import FrozenConfig
from vitline.infra.names import did_you_mean

PREFIX = "nights."


class NightSettings(FrozenConfig):
    """How often a pipeline trains, and which difference between two nights is of interest."""

    num_seeds: int = Field(1, ge=1, le=20)
    """Number of pre-trainings, each with its own evaluation, with consecutive seeds from `seed` on. The noise between seeds is
    only known from several: 3 are a good start."""
    wanted_difference: float = Field(0.01, ge=0, lt=1)
    """The smallest difference between two nights that is of interest, as a fraction: 0.01 is one point. Smaller ones are called
    the same."""
    ingest: bool = False
    """Whether new images of the source of `corpus` are added to it first, as a segment that is checked for leakage. The corpus must be
    prepared from class folders, a table or Parquet of your own."""
    advance_images: PositiveInt | None = None
    """For one long pre-training: the images of each night, counting repeats. It goes on where it stood the night before, and
    `train_images` is its whole length. None: every night trains anew."""
    cooldown_at_hours: PositiveFloat | None = None
    """For nights that shall not be longer: a training that is not at its end so many hours after the start of the night pauses with a
    checkpoint, and `cooldown_images` follow. Choose it so that cooldown and transfer end before `deadline_hours`."""
    cooldown_images: PositiveInt | None = None
    """With `advance_images` or `cooldown_at_hours`: what is scored is a branch that is trained on so many images more, in which the
    learning rate falls to zero. The long run itself goes on without it."""
    promote: bool = True
    """Whether a night that passes the gate becomes the champion. If not, only `vitline model promote` moves it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advance_images is not None and self.cooldown_at_hours is not None:
            raise ValueError(
                f"nights.cooldown_at_hours={self.cooldown_at_hours:g} is not supported with nights.advance_images, whose nights end by "
                "images. Leave one of them out."
            )
        length = "cooldown_at_hours" if self.cooldown_at_hours is not None else "advance_images"
        value = getattr(self, length)
        if (value is None) != (self.cooldown_images is None):
            raise ValueError(
                f"nights.{length}={value} and nights.cooldown_images={self.cooldown_images} belong together. Set both, such as "
                f"{'6' if self.cooldown_at_hours is not None else '1000000'} and 200000, or neither."
            )
        if value is not None and self.num_seeds > 1:
            raise ValueError(
                f"nights.num_seeds={self.num_seeds} is not supported with nights.{length}, which is for one training. Leave one of them "
                "out."
            )
        if self.advance_images is not None and self.ingest:
            raise ValueError(
                "nights.ingest is not supported with nights.advance_images: a long run keeps its place in the reading order of its "
                "corpus, which would be another one. Leave one of them out."
            )
        return self


def night_settings(overrides: Mapping[str, Any]) -> NightSettings:
    """The settings in the overrides of a form. Raises ValueError that names a wrong field."""
    given = {name.removeprefix(PREFIX): value for name, value in overrides.items() if name.startswith(PREFIX)}
    known = NightSettings.model_fields.keys()
    if unknown := next((name for name in given if name not in known), None):
        names = [f"{PREFIX}{name}" for name in known]
        hint = did_you_mean(f"{PREFIX}{unknown}", names)
        raise ValueError(f"There is no field '{PREFIX}{unknown}'; its fields are: {', '.join(names)}.{hint}")
    try:
        return NightSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise ValueError(str(first["ctx"]["error"])) from error
        raise ValueError(f"{PREFIX}{first['loc'][0]}: {first['msg']}, not {first['input']!r}.") from error
