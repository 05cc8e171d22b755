"""Curves in Weights & Biases, as one run of a project for each run of the store.

W&B takes steps in rising order only, and a journal holds later points of earlier steps too, such as the scores of a checkpoint. So the
step is a metric of its own, `step`, which is the axis of all others. W&B tells no points that it has: a process that follows a run anew
sends all of them, and equal points lie upon each other.
"""

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from vitline.flows.curves.journal_points import Curves
from vitline.infra.runs.segments import JournalRecord
from vitline.infra.storage import Store

if TYPE_CHECKING:
    import wandb

AXIS = "step"
CLOSE_S = 60.0


class WandbRun(Curves):
    """A run in a project, `PROJECT` or `ENTITY/PROJECT`, with the run's key as its id and its config. Login, server and mode are those of
    wandb's own settings, such as WANDB_API_KEY, WANDB_BASE_URL and WANDB_MODE=offline."""

    def __init__(self, run: Store, key: str, project: str) -> None:
        super().__init__(run)
        self._key, self._project = key, project
        self._there: wandb.Run | None = None
        self._points = dict[str, float]()

    def points(self) -> tuple[()]:
        return ()

    def add(self, record: JournalRecord) -> None:
        if self._points.get(AXIS, record.step) != record.step or record.key in self._points:
            self.flush()
        self._points |= {AXIS: record.step, record.key: record.value, "_timestamp": record.timestamp_ms / 1000}

    def flush(self) -> None:
        points, self._points = self._points, {}
        if points:
            self._there = self._there or self._open()
            self._there.log(points)

    def close(self) -> None:
        """Raises TimeoutError where W&B has not taken everything in time: it would go on for hours, and the work is to end."""
        if self._there is not None:
            ending = threading.Thread(target=self._finish, args=(self._there,), daemon=True)
            ending.start()
            ending.join(CLOSE_S)
            if ending.is_alive():
                raise TimeoutError(
                    f"W&B has not taken all of {self._key} in {CLOSE_S:g} s; `wandb sync` sends its folder."
                )

    @staticmethod
    def _finish(run: "wandb.Run") -> None:
        with contextlib.suppress(Exception):  # the process may end meanwhile
            run.finish()

    def _open(self) -> "wandb.Run":
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "VITLINE_WANDB is set, but wandb is not installed: `pip install wandb`."
            ) from None
        offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
        if not offline and not wandb.login(prompt=False):
            raise ValueError(
                "VITLINE_WANDB is set, but wandb knows no login: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline."
            )
        entity, _, project = self._project.rpartition("/")
        run = wandb.init(
            entity=entity or None,
            project=project,
            id=self._key,
            name=self._key,
            config=self._config(),
            resume="allow",
            reinit="create_new",  # a pipeline has several at a time
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        run.define_metric("*", step_metric=AXIS)
        return run

    def _config(self) -> Any:
        return self._run.read_json("config.json").get("config", {})
