"""A saved view of MLflow that shows states and headline metrics as columns, because MLflow's run lists show no metric by default.

A view is a tag of the experiment. Users add, change and delete views in MLflow's pages under *Views*. vitline adds its view
once, and adds the metrics of later runs to it as long as nobody has changed it.
"""

import base64
import json
import zlib
from collections.abc import Collection, Mapping
from typing import TypedDict

from vitline.infra.mlflow.mlflow_private import VIEW_TAG
from vitline.infra.settings import DEFAULT_PROJECT

VIEW_KEY = "vitlinescores"
_TAG, _OFFERED = f"{VIEW_TAG}{VIEW_KEY}", "vitline.view_offered"
_MAX_METRICS = 64  # a tag has at most 20,000 characters
# MLflow has five words for the state of a run, so that cancelled, preempted and out of time look alike without it.
_STATE_TAG = "tags.`vitline.state`"
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


class OwnView(TypedDict):
    """What vitline stores in its view beside what MLflow reads."""

    metrics: list[str]
    check: int
    """Checksum of the view as vitline wrote it."""
    created_at: int
    """Unix milliseconds."""


def changed_tags(
    tags: Mapping[str, str], metrics: Collection[str], now_ms: int, project: str = DEFAULT_PROJECT
) -> dict[str, str]:
    """The tags to set, in this order, on an experiment with `tags`, so that its view also shows these headline metrics.

    Empty if the view shows them already, or if somebody has changed or deleted the view.
    """
    wanted = {name for name in metrics if name.startswith(_GROUPS)}
    own = _own_view(tags[_TAG]) if _TAG in tags else None
    if not wanted or (own is None and (_TAG in tags or _OFFERED in tags)):
        return {}
    known = own.get("metrics", []) if own else []
    shown = sorted({*known, *wanted}, key=_place)[:_MAX_METRICS]
    if shown == known:
        return {} if _OFFERED in tags else {_OFFERED: "true"}
    state = _STATE | {
        "selectedColumns": ["attributes.`Duration`", _STATE_TAG, *(f"metrics.`{name}`" for name in shown)]
    }
    name = f"{project} scores"
    packed = f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"
    created_at = own.get("created_at", now_ms) if own else now_ms
    about: OwnView = {"metrics": shown, "check": _check(name, packed), "created_at": created_at}
    view = {"name": name, "createdAt": created_at, "updatedAt": now_ms, "state": packed, "vitline": about}
    return {_TAG: json.dumps(view), _OFFERED: "true"}


def _own_view(value: str) -> OwnView | None:
    """The data that vitline stored in its view; None if somebody has changed the view."""
    try:
        view = json.loads(value)
        return view["vitline"] if view["vitline"]["check"] == _check(view["name"], view["state"]) else None
    except (ValueError, KeyError, TypeError):
        return None


def _check(name: str, state: str) -> int:
    return zlib.crc32(f"{name} {state}".encode())


def _place(name: str) -> tuple[int, str]:
    return next(i for i, group in enumerate(_GROUPS) if name.startswith(group)), name
