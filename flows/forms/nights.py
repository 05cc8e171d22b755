"""The settings of a nightly pipeline: overrides that begin with `nights.`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator

from vitline.flows.forms.refusals import changes_below, refused
from vitline.infra.config import FrozenConfig
from vitline.infra.night import night_at, night_in

PREFIX = "nights."


class NightSettings(FrozenConfig):
    """How a pipeline trains each night, and which difference between two nights matters."""

    num_seeds: int = Field(1, ge=1, le=20)
    """Number of pre-trainings, each with its own evaluation, with consecutive seeds from `seed` on. Several are needed to measure
    the noise between seeds: 3 are a good start."""
    smallest_effect: float = Field(0.01, ge=0, lt=1)
    """The smallest difference between two nights that matters, as a fraction: 0.01 is one point. Smaller ones count as equal."""
    ingest: bool = False
    """Whether to first add the new images of the source of `corpus` to it, as a segment that is checked for leakage. The corpus must
    have been prepared from your own class folders, table or Parquet files."""
    advance_images: PositiveInt | None = None
    """Spread one long pre-training over the nights: the number of images per night, counting repeats. Each night resumes where the last
    one ended, up to `train_images`. None: every night trains from the start."""
    cooldown_at_hours: PositiveFloat | None = None
    """Pause training with a checkpoint this many hours after the night began, and continue with `cooldown_images`. Choose it so that
    cooldown and transfer end before `deadline_hours`."""
    cooldown_images: PositiveInt | None = None
    """With `advance_images` or `cooldown_at_hours`: evaluate a branch that is trained on this many more images while the learning rate
    decays to zero. The long run itself continues without it."""
    verdict_protocol: str | None = None
    """With several protocols: the one whose scores are compared with those of the champion and of last night. None: the last one."""
    promote: bool = True
    """Whether a night that passes the gate becomes the champion. If not, only `vitline model promote` changes the champion."""
    early_verdict: bool = True
    """Whether a night ends its evaluation as soon as the rest could hardly change the verdict. Its tasks are scored in groups then, the
    ones first that say most for their cost, and its seeds one after the other. A night is still evaluated as a whole once a week, where
    it may become the champion, and while too little is known of earlier nights. With false every night is."""
    night: str | None = None
    """For a run that a person starts: the night that it is. A scheduled start in the past, in UTC, such as `2026-11-23T02:00` for a night
    that was missed; or `now` for a further night. None: it is no night, and stages that are finished are reused."""

    @field_validator("night")
    @classmethod
    def _is_a_night(cls, night: str | None) -> str | None:
        if night not in (None, "now"):
            try:
                night_in(str(night))
            except ValueError as error:
                raise ValueError("must be `now`, or a scheduled start in UTC such as 2026-11-23T02:00") from error
        return night

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
    given = changes_below(PREFIX, overrides, NightSettings.model_fields)
    try:
        return NightSettings(**given)
    except ValidationError as error:
        raise refused(error, "nights") from error


def night_by_hand(overrides: Mapping[str, Any], due: datetime) -> datetime | None:
    """The night that `nights.night` makes of a run which a person starts and which is due now. Raises ValueError for one in the future."""
    chosen = night_settings(overrides).night
    if chosen is None:
        return None
    night = night_at(due) if chosen == "now" else night_in(chosen)
    if night > due:
        raise ValueError(
            f"nights.night={chosen} is in the future. Give the scheduled start of a night that was missed, or `now`."
        )
    return night
