"""The page over all nights: one HTML file."""

from collections.abc import Sequence
from datetime import UTC, datetime

from vitline.flows.nights.judge import short_name
from vitline.flows.nights.night_record import last_told
from vitline.flows.nights.trend.trend import KINDS, NightPoint, Series, mean_text, row_id, trend_plot
from vitline.infra.html.page import render
from vitline.infra.html.text import duration, percent
from vitline.infra.night import night_text


def render_trend(root: str, every: Sequence[Series]) -> str:
    """The page of some series, newest night first."""
    return render(
        "flows/nights/trend/trend.html.j2",
        title="Nights",
        root=root,
        now=datetime.now(UTC),
        every=[
            {
                "name": series.name,
                "champion": series.champion,
                "plot": trend_plot(series),
                "last": (last_told(nights := [p.night for p in reversed(series.points)]) or nights[0]).sentence,
                "columns": [
                    "night",
                    "verdict",
                    "mean",
                    *map(short_name, tasks := _tasks(series)),
                    "images",
                    "time",
                    "",
                ],
                "rows": [_row(point, tasks) for point in reversed(series.points)],
            }
            for series in every
        ],
    )


def _tasks(series: Series) -> list[str]:
    return [*dict.fromkeys(name for point in series.points for name in point.tasks)]


def _row(point: NightPoint, tasks: Sequence[str]) -> dict[str, object]:
    def accuracy(value: float | None) -> str:
        return "" if value is None else percent(value)

    return {
        "id": row_id(point.night),
        "kind": KINDS.get(point.word, ""),
        "word": point.word,
        "night": night_text(point.night.night),
        "cells": [
            "" if point.mean is None else mean_text(point),
            *(accuracy(point.tasks.get(name)) for name in tasks),
            "" if point.num_images is None else f"{point.num_images:,}",
            "" if point.wall_s is None else duration(point.wall_s),
        ],
        "sentence": point.night.sentence,
        "page": point.night.origin.flow_run_url,
    }
