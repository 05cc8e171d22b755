"""The shipper's child process: sends what the store holds of runs and pipelines to MLflow (DESIGN 3.5).

    python -m flows.ship_runs --root URI --parent P  follows what JSON lines on stdin name, until stdin ends
    python -m flows.ship_runs --root URI --sync ...  sends what is missing of all runs, or of some, and ends

Lines in: {"run": key}, {"pipeline": key}, {"close": seconds}. Out, after close or at the end of a sync: one JSON object.
The store is the truth: whatever is cut off here, the next shipper finds how far MLflow is and sends the rest.
"""

import argparse
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.run_views import Published, View, list_pipelines, list_run_keys, pipeline_view, run_view
from infra.config import digest_of
from infra.journal import Segment, list_segments, read_segments
from infra.redact import log_to_stderr
from infra.settings import Settings, secret_values
from infra.storage import Store, open_store
from infra.tracking import DataUse, Model, Point, TrackedRun, Tracking, thinned
from infra.tracking_ids import RUN, TrackingIds, pipeline_ids_key

log = logging.getLogger("shipper")

Kind = Literal["run", "pipeline"]
Outcome = Literal["sent", "unchanged", "absent", "deleted"]
SHIPPED = "vitline.shipped"
POLL_S, MAX_BACKOFF_S = 5.0, 15.0
LISTING_S = 15.0  # between two looks for new segments of a run whose state has not changed; they come every 30 s
LAST_TRIES = 3  # of a close; a second apart
ORPHAN_S = 5.0  # to send what is sealed once the parent is gone
_SEGMENTS_A_TIME = 256


@dataclass
class Curves:
    """How far the journal of a run has been sent to one MLflow run, and which points of it are shown."""

    run_id: str
    done: dict[str, int] = field(default_factory=dict)
    """Number of the next segment by journal, as {"a1": 12, "a1/node-1": 3}."""
    known: set[tuple[str, int]] = field(default_factory=set)
    seen: dict[str, set[int]] = field(default_factory=dict)


class Sender:
    """Sends single runs and pipelines of one root; each call sends what is missing and raises where it cannot."""

    def __init__(self, root: Store, tracking: Tracking) -> None:
        self.root, self.tracking = root, tracking
        self._curves: dict[str, Curves] = {}

    def send(self, kind: Kind, key: str) -> Outcome:
        return self.send_run(key) if kind == "run" else self.send_pipeline(key)

    def send_run(self, key: str) -> Outcome:
        """Everything of a run that MLflow does not have yet."""
        view = run_view(self.root, key)
        if view is None:
            return "absent"
        makers = {digest: maker for digest, maker in view.model_inputs.items() if maker != key}
        for maker in makers.values():  # the models that it reads are to be there before it
            self.send_run(maker)
        store = self.root.child(f"runs/{key}")
        ids = TrackingIds(store, self.tracking.uri)
        parent = self._parent(view.pipeline)
        run = self.tracking.run(ids, view.experiment, key, view.store_uri, view.start_ms, view.tags)
        if run is None:
            return "deleted"
        segments, digest = list_segments(store), digest_of([view.digest, parent and parent.run_id])[:16]
        curves = self._curves_of(key, run, store, segments, view.total_steps)
        fresh = [s for s in segments if s.number >= curves.done.get(journal_name(s), 0)]
        if not fresh and shipped(run).get("view") == digest:
            return "unchanged"
        self.tracking.put_tags(run, view.tags | ({"mlflow.parentRunId": parent.run_id} if parent else {}))
        self.tracking.put_params(run, view.params)
        self.tracking.put_data(run, [DataUse(**vars(corpus)) for corpus in view.corpora])
        self._send_curves(run, store, fresh, curves, view.total_steps)
        self.tracking.put_files(run, view.files)
        models = self._models(makers)
        self._send_values(run, view, [model_id for model_id, _ in models])
        facts = [*view.facts, *(link for _, link in models)]
        if view.model:
            ref = self.tracking.publish(run, ids, self._model(view.model, store, segments))
            facts.append(f"**Model:** [{view.model.name} version {ref.version}]({ref.url}), `{view.model.uri}`")
        if parent:
            facts.append(f"**Part of:** [{view.pipeline}]({parent.url})")
        self._finish(run, view, facts, digest, curves)
        return "sent"

    def send_pipeline(self, key: str) -> Outcome:
        """The parent run of a pipeline, after the runs of its stages."""
        try:
            view, record = pipeline_view(self.root, key)
        except FileNotFoundError:
            return "absent"
        stages = [stage for stage in record.stages if stage.run_key]
        for stage in stages:
            self.send_run(str(stage.run_key))
        run = self._tracked_parent(view)
        if run is None:
            return "deleted"
        links = {s.stage: TrackingIds(self.root.child(f"runs/{s.run_key}"), self.tracking.uri).read() for s in stages}
        digest = digest_of([view.digest, links, [s.model_dump(mode="json") for s in record.stages]])[:16]
        if shipped(run).get("view") == digest:
            return "unchanged"
        runs = {f"vitline.run.{stage}": found[RUN] for stage, found in links.items() if RUN in found}
        self.tracking.put_tags(run, view.tags | runs)
        self.tracking.put_params(run, view.params)
        self.tracking.put_data(run, [DataUse(**vars(corpus)) for corpus in view.corpora])
        self.tracking.put_files(run, view.files)
        self._send_values(run, view, [])
        table = ["| stage | run | what | |", "|---|---|---|---|"]
        for stage in record.stages:
            url = links.get(stage.stage, {}).get("url")
            name = f"[{stage.run_key}]({url})" if url else stage.run_key or ""
            time_spent = "reused" if stage.reused else f"{stage.wall_s:,.0f} s"
            table.append(f"| {stage.stage} | {name} | {stage.what} | {time_spent} |")
        facts = [*view.facts, *(link for _, link in self._models(view.model_inputs))]
        self._finish(run, view, facts, digest, None, "\n".join(table) if record.stages else "")
        return "sent"

    def _parent(self, pipeline: str | None) -> TrackedRun | None:
        if pipeline is None:
            return None
        try:
            return self._tracked_parent(pipeline_view(self.root, pipeline)[0])
        except FileNotFoundError:
            return None

    def _tracked_parent(self, view: View) -> TrackedRun | None:
        ids = TrackingIds(self.root, self.tracking.uri, pipeline_ids_key(view.key))
        return self.tracking.run(ids, view.experiment, view.key, view.store_uri, view.start_ms, view.tags)

    def _curves_of(self, key: str, run: TrackedRun, store: Store, segments: list[Segment], total_steps: int) -> Curves:
        """As MLflow has them; what this process remembers is right unless another shipper was here, or a new server."""
        done = shipped(run).get("segments", {})
        curves = self._curves.get(key)
        if curves is None or (curves.run_id, curves.done) != (run.run_id, done):
            curves = self._curves[key] = Curves(run.run_id, done)
            sent = [s for s in segments if s.number < done.get(journal_name(s), 0)]
            for first in range(0, len(sent), _SEGMENTS_A_TIME):
                choose_points(store, sent[first : first + _SEGMENTS_A_TIME], curves, total_steps)
        return curves

    def _send_curves(
        self, run: TrackedRun, store: Store, fresh: list[Segment], curves: Curves, total_steps: int
    ) -> None:
        for first in range(0, len(fresh), _SEGMENTS_A_TIME):
            part = fresh[first : first + _SEGMENTS_A_TIME]
            points = choose_points(store, part, curves, total_steps)
            self.tracking.put_points(run, points)
            curves.done = curves.done | {journal_name(s): s.number + 1 for s in part}
            self.tracking.put_tags(run, {SHIPPED: json.dumps({"segments": curves.done}, sort_keys=True)})

    def _models(self, makers: Mapping[str, str]) -> list[tuple[str, str]]:
        """Id and link of the models that a run reads; MLflow's pages show inputs of their own experiment only."""
        found = []
        for digest, maker in makers.items():
            names = TrackingIds(self.root.child(f"runs/{maker}"), self.tracking.uri).read()
            model_id, version = (names.get(f"{kind} {digest[:12]}") for kind in ("model", "version"))
            if model_id and version:
                name = maker.rpartition("-")[0]
                url = self.tracking.version_url(name, version)
                found.append((model_id, f"**Model:** [{name} version {version}]({url}) of [{maker}]({names['url']})"))
        return found

    def _send_values(self, run: TrackedRun, view: View, models: list[str]) -> None:
        at = view.end_ms or int(time.time() * 1000)
        points = [Point(key, value, step, at) for key, (value, step) in view.values.items()]
        of_model = [p for p in points if len(models) == 1 and p.step and not p.key.startswith("time/")]
        self.tracking.put_points_once(run, of_model, models[0] if models else None)
        self.tracking.put_points_once(run, [p for p in points if p not in of_model])

    def _model(self, model: Published, store: Store, segments: list[Segment]) -> Model:
        """With its held-out scores just as the journal has them, so that the run shows each once."""
        last = [segment for segment in segments if not segment.writer][-4:]
        records = [record for part in read_segments(store, last) for record in part]
        scores = [Point(r.key, r.value, r.step, r.timestamp_ms) for r in records if r.key.startswith("val/")]
        return Model(**vars(model), points=scores)

    def _finish(
        self, run: TrackedRun, view: View, facts: list[str], digest: str, curves: Curves | None, more: str = ""
    ) -> None:
        """The note, the state, and last how far this was: what was cut off before is sent again."""
        state = f"**{view.state}**" + (f": {view.tags['vitline.reason']}" if view.tags.get("vitline.reason") else "")
        lines = "\n".join(f"- {fact}" for fact in [*facts, f"**Store:** `{view.store_uri}`"])
        self.tracking.put_tags(run, {"mlflow.note.content": "\n\n".join(filter(None, (state, more, lines)))})
        self.tracking.put_status(run, view.status, view.end_ms)
        done = {"segments": curves.done} if curves else {}
        self.tracking.put_tags(run, {SHIPPED: json.dumps({**done, "view": digest}, sort_keys=True)})


def choose_points(store: Store, segments: list[Segment], curves: Curves, total_steps: int) -> list[Point]:
    """The points of segments that MLflow gets; `curves` notes them. Each (key, step) counts once, wherever it stands."""
    points = []
    for records in read_segments(store, segments):
        for record in records:
            if (record.key, record.step) not in curves.known:
                curves.known.add((record.key, record.step))
                points.append(Point(record.key, record.value, record.step, record.timestamp_ms))
    return thinned(points, curves.seen, total_steps)


def journal_name(segment: Segment) -> str:
    return f"a{segment.attempt}/{segment.writer}".rstrip("/")


def shipped(run: TrackedRun) -> dict[str, Any]:
    """What an earlier shipper noted on the MLflow run; nothing where it cannot be read."""
    try:
        return json.loads(run.tags.get(SHIPPED, "{}"))
    except ValueError:
        return {}


@dataclass
class Followed:
    """A run or pipeline that is followed. `sign` is what the store showed when it was last sent whole."""

    kind: Kind
    key: str
    sign: Any = None
    listed_at: float = float("-inf")


class Follower:
    """Sends what is followed, again and again, in a thread. MLflow away: it tries again, at growing intervals."""

    def __init__(self, root: Store, connect: Callable[[], Tracking]) -> None:
        self._root, self._connect = root, connect
        self._sender: Sender | None = None
        self._followed: dict[tuple[Kind, str], Followed] = {}
        self._lock, self._wake, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._left: set[str] = set()
        self.done = threading.Event()
        threading.Thread(target=self._work, name="sending", daemon=True).start()

    def follow(self, kind: Kind, key: str) -> None:
        with self._lock:
            self._followed.setdefault((kind, key), Followed(kind, key))
            self._left.add(key)
        self._wake.set()

    def close(self, seconds: float) -> list[str]:
        """Tries for so long to send everything as it stands now; the keys that are not wholly sent."""
        with self._lock:
            self._left = {followed.key for followed in self._followed.values()}
        self._closing.set()
        self._wake.set()
        self.done.wait(seconds)
        with self._lock:
            return sorted(self._left)

    def _work(self) -> None:
        failures = last_tries = 0
        while True:
            closing = self._closing.is_set()
            ok = self._pass(closing, asking_first=failures > 0)
            failures = 0 if ok else failures + 1
            last_tries += closing
            if closing and (ok or last_tries == LAST_TRIES):
                self.done.set()
                return
            self._wake.wait(1.0 if closing else min(POLL_S * 2**failures, MAX_BACKOFF_S) if failures else POLL_S)
            self._wake.clear()

    def _pass(self, closing: bool, asking_first: bool) -> bool:
        with self._lock:
            followed = list(self._followed.values())
        ok = True
        if asking_first:  # one request may hang; not one for each run
            try:
                self._connected().tracking.ping()
            except Exception as error:
                log.warning("MLflow does not answer: %s", one_line(error))
                return False
        for each in followed:
            try:
                self._send(each, closing)
            except Exception as error:
                log.warning("%s %s is not sent: %s", each.kind, each.key, one_line(error))
                log.debug("", exc_info=True)
                ok = False
                continue
            with self._lock:
                self._left.discard(each.key)
        return ok

    def _send(self, each: Followed, closing: bool) -> None:
        sign = self._sign(each, closing)
        if sign is not None and sign == each.sign:
            return
        outcome = self._connected().send(each.kind, each.key)
        if outcome != "unchanged":
            log.info("%s %s: %s", each.kind, each.key, outcome)
        each.sign = sign

    def _connected(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self._root, self._connect())
        return self._sender

    def _sign(self, each: Followed, closing: bool) -> Any:
        """What the store shows of it, in few requests: state, attempts and, now and then, the segments."""
        if each.kind == "pipeline":
            return tagged(self._root, f"pipelines/{each.key}.json")
        store = self._root.child(f"runs/{each.key}")
        state = (tagged(store, "state.json"), tagged(store, "verdict.json"))
        now = time.monotonic()
        if not closing and each.sign and each.sign[0] == state and now - each.listed_at < LISTING_S:
            return each.sign
        each.listed_at = now
        return (state, store.list("attempts/"), list_segments(store))


def tagged(store: Store, key: str) -> str | None:
    try:
        return store.read_tagged(key)[1]
    except FileNotFoundError:
        return None


def one_line(error: Exception) -> str:
    """What went wrong, for people; of an MLflow that is away no more than that."""
    text = " ".join(str(error).split())
    if "failed with exception" in text and "API request to" in text:
        return f"MLflow does not answer ({text.partition(' failed with exception')[0]})"
    return f"{type(error).__name__}: {text}"[:500]


def sync(root: Store, tracking: Tracking, keys: list[str]) -> dict[str, Any]:
    """Sends what is missing of the named runs and pipelines, or of all. Stops where MLflow itself does not answer."""
    known: list[tuple[Kind, str]] = [("run", key) for key in list_run_keys(root)]
    known += [("pipeline", key) for key in list_pipelines(root)]
    chosen = [(kind, key) for kind, key in known if not keys or key in keys]
    sender = Sender(root, tracking)
    done: dict[str, list[str]] = {name: [] for name in ("sent", "unchanged", "absent", "deleted")}
    left: dict[str, str] = {}
    for number, (kind, key) in enumerate(chosen):
        try:
            if left or not number:
                tracking.ping()
        except Exception as error:
            left |= dict.fromkeys([key for _, key in chosen[number:]], one_line(error))
            break
        try:
            done[sender.send(kind, key)].append(key)
        except Exception as error:
            log.debug("%s", key, exc_info=True)
            left[key] = one_line(error)
    return {**done, "left": left}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--parent", type=int, help="process that is followed into its end")
    parser.add_argument("--sync", nargs="*", metavar="KEY")
    args = parser.parse_args(argv)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what MLflow prints belongs into the log
    log_to_stderr()
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # says each of its tries, in three lines
    uri = Settings().mlflow_tracking_uri
    if uri is None:
        parser.error("MLFLOW_TRACKING_URI is not set: there is no server to send to.")
    root = open_store(args.root)
    if args.sync is not None:
        print(json.dumps(sync(root, Tracking(uri, secret_values()), args.sync)), file=answers, flush=True)
        return
    os.nice(5)  # training goes first
    left = follow_stdin(Follower(root, lambda: Tracking(uri, secret_values())), args.parent)
    print(json.dumps({"left": left}), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # a request that hangs is not waited for


def follow_stdin(follower: Follower, parent: int | None) -> list[str]:
    """Obeys the parent's lines; returns what is left at its word, or a few seconds after its end."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            # A process that the parent forked may hold the pipe open after it.
            line = {} if parent in (None, os.getppid()) else None
        if line is None:
            return follower.close(ORPHAN_S)
        if "close" in line:
            return follower.close(line["close"])
        for kind in ("run", "pipeline"):
            if kind in line:
                follower.follow(kind, line[kind])


if __name__ == "__main__":
    main()
