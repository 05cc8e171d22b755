"""Columns of a list of runs as a saved view of MLflow's pages: their lists show no metric by themselves.

A view is a tag of the experiment, which people add, change and delete in the page under *Views*. Ours is offered once and
gets the metrics of later runs for as long as nobody has changed it.
"""

import base64
import json
import zlib
from collections.abc import Collection, Mapping

VIEW_KEY = "vitlinescores"
NAME = "vitline scores"
_TAG, _OFFERED = f"mlflow.sharedViewState.{VIEW_KEY}", "vitline.view_offered"
_MAX_METRICS = 32  # a tag takes 5,000 characters
_GROUPS = ("val/top1", "vtab/", "tasks/")
_STATE = {
    "searchFilter": "",
    "orderByKey": "attributes.start_time",
    "orderByAsc": False,
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "datasetsFilter": [],
    "modelVersionFilter": "All Runs",
    "columnOrder": [],
    "columnWidths": {},
    "runsHiddenMode": "FIRST_10_RUNS",
    "viewMaximized": False,
    "runListHidden": False,
    "isAccordionReordered": False,
    "useGroupedValuesInCharts": True,
    "hideEmptyCharts": True,
    "groupBy": None,
    "groupsExpanded": {},
    "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
}


def changed_tags(tags: Mapping[str, str], metrics: Collection[str], now_ms: int) -> dict[str, str]:
    """The tags to set on an experiment that has `tags`, so that its view shows these headline metrics, too; none where
    it does already, or where somebody has changed or deleted the view."""
    wanted = {name for name in metrics if name.startswith(_GROUPS)}
    known = set(_unchanged_metrics(tags[_TAG]) or ()) if _TAG in tags else set[str]()
    if wanted <= known or (_OFFERED in tags and not known):
        return {}
    shown = sorted(known | wanted, key=_place)[:_MAX_METRICS]
    state = _STATE | {"selectedColumns": ["attributes.`Duration`", *(f"metrics.`{name}`" for name in shown)]}
    packed = f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"
    own = {"metrics": shown, "check": _check(NAME, packed)}
    view = {"name": NAME, "createdAt": now_ms, "updatedAt": now_ms, "state": packed, "vitline": own}
    return {_OFFERED: "true", _TAG: json.dumps(view)}


def _unchanged_metrics(value: str) -> list[str] | None:
    """What our view shows; None where somebody has changed it."""
    try:
        view = json.loads(value)
        return view["vitline"]["metrics"] if view["vitline"]["check"] == _check(view["name"], view["state"]) else None
    except (ValueError, KeyError, TypeError):
        return None


def _check(name: str, state: str) -> int:
    return zlib.crc32(f"{name} {state}".encode())


def _place(name: str) -> tuple[int, str]:
    return next(i for i, group in enumerate(_GROUPS) if name.startswith(group)), name
