"""Sends a run or pipeline of the store to MLflow: only what MLflow lacks, and repeating it changes nothing.

The content comes from the run snapshot (`stage_snapshots.py`), the curves from the journal. What was sent is recorded in a tag
of the MLflow run, so that any sender continues where another was interrupted.
"""

import contextlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from vitline.flows.catalog.records import PipelineRecord
from vitline.flows.catalog.stored_configs import JSON
from vitline.flows.nights.night_record import read_champion
from vitline.flows.to_mlflow.outbox import OutboxEntry
from vitline.flows.to_mlflow.run_snapshot import Child, RunView
from vitline.flows.to_mlflow.stage_snapshots import pipeline_snapshot, stage_snapshot
from vitline.infra.config import digest_of
from vitline.infra.html.tables import markdown
from vitline.infra.html.text import percent
from vitline.infra.mlflow.entities import Model, Point
from vitline.infra.mlflow.pages import version_url
from vitline.infra.mlflow.tracking import TrackedRun, Tracking, downsampled
from vitline.infra.mlflow.tracking_ids import RUN, TrackingIds, child_ids_key, pipeline_ids_key
from vitline.infra.runs.segments import Segment, list_segments, read_segments
from vitline.infra.settings import Settings
from vitline.infra.storage import Store

Outcome = Literal["sent", "unchanged", "absent", "deleted"]
SHIPPED = "vitline.shipped"
INHERITED = ("vitline.stage", "mlflow.user", "mlflow.source.name")
"""Tags of a run that its children get, too."""
_SEGMENTS_A_TIME = 256


@dataclass
class Curves:
    """Which segments of a run's journal were sent to one MLflow run, and which of their points."""

    run_id: str
    done: dict[str, int] = field(default_factory=dict)
    """Number of the next segment by journal, such as {"a1": 12, "a1/node-1": 3}."""
    known: set[tuple[str, int]] = field(default_factory=set)
    seen: dict[str, set[int]] = field(default_factory=dict)


class ShippedNote(TypedDict, total=False):
    """What was sent of a run, in a tag of its MLflow run."""

    view: str
    """Digest of the run snapshot; absent until all of it was sent."""
    segments: dict[str, int]
    """Number of the next segment by journal."""


class Sender:
    """Sends single runs and pipelines of one root. Each call sends what MLflow lacks, and raises if that fails."""

    def __init__(self, root: Store, tracking: Tracking) -> None:
        self.root, self.tracking = root, tracking
        self._curves: dict[str, Curves] = {}

    def send(self, entry: OutboxEntry) -> Outcome:
        """Sends what MLflow lacks of a run or pipeline."""
        return self.send_run(entry.key) if entry.kind == "run" else self.send_pipeline(entry.key)

    def forget_others(self, keys: Collection[str]) -> None:
        """Forgets what was sent of the curves of all runs but these."""
        self._curves = {key: curves for key, curves in self._curves.items() if key in keys}

    def send_run(self, key: str) -> Outcome:
        """Sends everything of a run that MLflow lacks."""
        snapshot = stage_snapshot(self.root, key)
        if snapshot is None:
            return "absent"
        makers = {digest: maker for digest, maker in snapshot.model_inputs.items() if maker != key}
        for maker in makers.values():  # the models that it reads must be in MLflow before it
            self.send_run(maker)
        store, ids = self.root.child(f"runs/{key}"), self._ids(key)
        parent = self._parent(snapshot.pipeline)
        run = self._tracked(ids, snapshot)
        if run is None:
            return "deleted"
        if snapshot.branch_of:  # now that this run has a page, that of its parent can link to it
            self.send_run(snapshot.branch_of)
        related = self._related(snapshot)
        content = [snapshot.digest, parent and parent.run_id, *related]
        segments, digest = list_segments(store), digest_of(content)[:16]
        curves = self._curves_of(key, run, store, segments, snapshot.total_steps)
        fresh = [s for s in segments if s.number >= curves.done.get(s.journal, 0)]
        if not fresh and shipped(run).get("view") == digest:
            return "unchanged"
        self._put(run, snapshot, snapshot, snapshot.tags | ({"mlflow.parentRunId": parent.run_id} if parent else {}))
        self._send_curves(run, store, fresh, curves, snapshot.total_steps)
        self.tracking.put_files(run, snapshot.files)
        models = self._models(makers)
        self._send_values(run, snapshot, [model_id for model_id, _ in models])
        facts = [*snapshot.facts, *related, *(link for _, link in models)]
        if snapshot.model:
            facts.append(self._publish(run, ids, self._with_points(snapshot.model, store, segments)))
        if parent:
            facts.append(f"**Part of:** [{snapshot.pipeline}]({parent.url})")
        pages = [self._send_child(child, snapshot, run, store) for child in snapshot.children]
        self._offer_columns(run, snapshot)
        self._finish(run, snapshot, facts, digest, curves, children_table(snapshot, pages))
        return "sent"

    def _send_child(self, child: Child, snapshot: RunView, run: TrackedRun, store: Store) -> str | None:
        """Sends a child run. Returns the URL of its page, or None if a user has deleted it in MLflow."""
        ids = TrackingIds(store, self.tracking.uri, child_ids_key(child.slug))
        tags = {name: snapshot.tags[name] for name in INHERITED if name in snapshot.tags} | child.tags
        tags |= {"mlflow.parentRunId": run.run_id}
        key = f"{snapshot.key}/{child.slug}"
        part = self.tracking.run(ids, snapshot.experiment, key, snapshot.store_uri, snapshot.start_ms, tags, child.name)
        if part is None:
            return None
        digest = digest_of([child.digest, tags, snapshot.status, snapshot.end_ms])[:16]
        if shipped(part).get("view") == digest:
            return part.url
        self._put(part, snapshot, child, tags)
        at = snapshot.end_ms or int(time.time() * 1000)
        points = [Point(metric, value, step, at) for metric, (value, step) in child.values.items()]
        points += [Point(metric, value, step, at) for metric, value, step in child.curves]
        self.tracking.put_points_once(part, points)
        self.tracking.put_files(part, self._files(child))
        published = [self._publish(part, ids, model) for model in child.models]
        facts = [*child.facts, *published, f"**Part of:** [{snapshot.key}]({run.url})"]
        self._finish(part, snapshot, facts, digest, None, child.table)
        return part.url

    def _files(self, child: Child) -> dict[str, bytes]:
        files = dict(child.files)
        for name, key in child.stored_files.items():
            with contextlib.suppress(FileNotFoundError):  # deleted since: the others are still sent
                files[name] = self.root.read(key)
        return files

    def send_pipeline(self, key: str) -> Outcome:
        """Sends the runs of a pipeline's stages, then the parent run."""
        try:
            snapshot, record = pipeline_snapshot(self.root, key)
        except FileNotFoundError:
            return "absent"
        stages = [stage for stage in record.stages if stage.run_key]
        for stage in stages:
            self.send_run(str(stage.run_key))
        self._send_champion(record)
        run = self._tracked_parent(snapshot)
        if run is None:
            return "deleted"
        links = {stage.run_key: self._ids(str(stage.run_key)).read() for stage in stages}
        digest = digest_of([snapshot.digest, links, [s.model_dump(mode="json") for s in record.stages]])[:16]
        if shipped(run).get("view") == digest:
            return "unchanged"
        if record.model and record.model_digest and (reason := snapshot.tags.get("vitline.gate")):
            self.tracking.put_gate(registered_name(record.model), record.model_digest, reason)
        first = {name: links.get(stage.run_key, {}) for name, stage in record.first_stages.items()}
        runs = {f"vitline.run.{stage}": found[RUN] for stage, found in first.items() if RUN in found}
        self._put(run, snapshot, snapshot, snapshot.tags | runs)
        self.tracking.put_files(run, snapshot.files)
        self._send_values(run, snapshot, [])
        rows = []
        for stage in record.stages:
            url = links.get(stage.run_key, {}).get("url")
            name = f"[{stage.run_key}]({url})" if url else stage.run_key or ""
            time_spent = "reused" if stage.reused else f"{stage.wall_s:,.0f} s"
            rows.append([stage.stage, name, stage.what, time_spent])
        facts = [*snapshot.facts, *(link for _, link in self._models(snapshot.model_inputs))]
        self._offer_columns(run, snapshot)
        self._finish(run, snapshot, facts, digest, None, markdown(("stage", "run", "what", ""), rows) if rows else "")
        return "sent"

    def _send_champion(self, record: PipelineRecord) -> None:
        """The alias of the registry, if the pipeline is the champion of its series."""
        champion = read_champion(self.root, record.name)
        if champion is not None and champion.pipeline == record.key:
            name, digest = registered_name(champion.model), champion.model_digest
            self.tracking.put_champion(name, digest, champion.counter, champion.reason, champion.by_hand)

    def _put(self, run: TrackedRun, snapshot: RunView, view: RunView | Child, tags: JSON) -> None:
        """Sends the status first, because a slow server may take long for the rest."""
        self.tracking.put_status(run, snapshot.status, snapshot.end_ms)
        self.tracking.put_tags(run, tags)
        self.tracking.put_params(run, view.params)
        self.tracking.put_data(run, view.corpora)

    def _parent(self, pipeline: str | None) -> TrackedRun | None:
        with contextlib.suppress(FileNotFoundError):
            return self._tracked_parent(pipeline_snapshot(self.root, pipeline)[0]) if pipeline else None
        return None

    def _tracked_parent(self, snapshot: RunView) -> TrackedRun | None:
        return self._tracked(TrackingIds(self.root, self.tracking.uri, pipeline_ids_key(snapshot.key)), snapshot)

    def _tracked(self, ids: TrackingIds, snapshot: RunView) -> TrackedRun | None:
        about = snapshot.experiment, snapshot.key, snapshot.store_uri, snapshot.start_ms, snapshot.tags, snapshot.name
        return self.tracking.run(ids, *about)

    def _ids(self, run_key: str) -> TrackingIds:
        return TrackingIds(self.root.child(f"runs/{run_key}"), self.tracking.uri)

    def _curves_of(self, key: str, run: TrackedRun, store: Store, segments: list[Segment], total_steps: int) -> Curves:
        """What MLflow has of the curves. What this process remembers is used unless another sender has sent points since, or
        the server is a new one."""
        done = shipped(run).get("segments", {})
        curves = self._curves.get(key)
        if curves is None or (curves.run_id, curves.done) != (run.run_id, done):
            curves = self._curves[key] = Curves(run.run_id, done)
            sent = [s for s in segments if s.number < done.get(s.journal, 0)]
            for first in range(0, len(sent), _SEGMENTS_A_TIME):
                choose_points(store, sent[first : first + _SEGMENTS_A_TIME], curves, total_steps)
        return curves

    def _send_curves(
        self, run: TrackedRun, store: Store, fresh: list[Segment], curves: Curves, total_steps: int
    ) -> None:
        for first in range(0, len(fresh), _SEGMENTS_A_TIME):
            part = fresh[first : first + _SEGMENTS_A_TIME]
            points = choose_points(store, part, curves, total_steps)
            self.tracking.log_points(run, points)
            curves.done = curves.done | {s.journal: s.number + 1 for s in part}
            self.tracking.put_tags(run, {SHIPPED: json.dumps({"segments": curves.done}, sort_keys=True)})

    def _models(self, makers: Mapping[str, str]) -> list[tuple[str, str]]:
        """Ids of the models that a run reads, with links, because MLflow's pages show only inputs of the same experiment."""
        found = []
        for digest, maker in makers.items():
            names = self._ids(maker).read()
            model_id, version = (names.get(f"{kind} {digest[:12]}") for kind in ("model", "version"))
            if model_id and version:
                name = Settings().named(maker.rpartition("-")[0])
                url = version_url(self.tracking.uri, name, version)
                found.append((model_id, f"**Model:** [{name} version {version}]({url}) of [{maker}]({names['url']})"))
        return found

    def _related(self, snapshot: RunView) -> list[str]:
        """The lines about other runs, with links to the pages that these have in MLflow."""
        lines = []
        for key, text in snapshot.related.items():
            url = self._ids(key).read().get("url")
            lines.append(text.format(run=f"[{key}]({url})" if url else key))
        return lines

    def _send_values(self, run: TrackedRun, snapshot: RunView, models: list[str]) -> None:
        at = snapshot.end_ms or int(time.time() * 1000)
        points = [Point(key, value, step, at) for key, (value, step) in snapshot.values.items()]
        of_model = [p for p in points if len(models) == 1 and p.step and not p.key.startswith("time/")]
        self.tracking.put_points_once(run, of_model, models[0] if models else None)
        self.tracking.put_points_once(run, [p for p in points if p not in of_model])

    def _publish(self, run: TrackedRun, ids: TrackingIds, model: Model) -> str:
        """Publishes a model of a run in the registry; the line of the run's description that links to it."""
        ref = self.tracking.publish(run, ids, replace(model, name=registered_name(model.uri)))
        return f"**Model:** [{model.name} version {ref.version}]({ref.url}), `{model.uri}`"

    def _with_points(self, model: Model, store: Store, segments: list[Segment]) -> Model:
        """A model with its validation scores as points of the journal, so that the run shows each once."""
        last = [segment for segment in segments if not segment.writer][-4:]
        records = [record for part in read_segments(store, last) for record in part]
        scores = [Point(r.key, r.value, r.step, r.timestamp_ms) for r in records if r.key.startswith("val/")]
        return replace(model, points=scores)

    def _offer_columns(self, run: TrackedRun, snapshot: RunView) -> None:
        if snapshot.end_ms is not None:
            self.tracking.offer_view(run.experiment_id, snapshot.values.keys())

    def _finish(
        self,
        run: TrackedRun,
        snapshot: RunView,
        facts: list[str],
        digest: str,
        curves: Curves | None,
        more: str = "",
    ) -> None:
        """Sends the description, and last the tag that records what was sent: an interrupted send is repeated."""
        state = f"**{snapshot.state}**" + (
            f": {snapshot.tags['vitline.reason']}" if snapshot.tags.get("vitline.reason") else ""
        )
        lines = "\n".join(f"- {fact}" for fact in [*facts, f"**Store:** `{snapshot.store_uri}`"])
        self.tracking.put_tags(run, {"mlflow.note.content": "\n\n".join(filter(None, (state, more, lines)))})
        if snapshot.end_ms is not None:
            self.tracking.delete_copies(run)
        note: ShippedNote = {"segments": curves.done, "view": digest} if curves else {"view": digest}
        self.tracking.put_tags(run, {SHIPPED: json.dumps(note, sort_keys=True)})


def registered_name(model: str) -> str:
    """The name in MLflow's registry of a model's URI, `.../models/<name>/<version>`."""
    return Settings().named(model.rstrip("/").split("/")[-2])


def children_table(snapshot: RunView, pages: Sequence[str | None]) -> str:
    """The children of a run with their headline metrics and pages, as Markdown; empty if it has none."""
    rows = []
    for child, page in zip(snapshot.children, pages, strict=True):
        values = {name: value for name, (value, _) in child.values.items() if name.endswith("/top1")}
        shown = ", ".join(f"`{name}` {percent(value)}" for name, value in values.items())
        rows.append([f"[{child.name}]({page})" if page else child.name, shown])
    return markdown(("part", ""), rows) if rows else ""


def choose_points(store: Store, segments: list[Segment], curves: Curves, total_steps: int) -> list[Point]:
    """The points of segments that MLflow gets, recorded in `curves`. Of several points for one key and step the first counts."""
    points = []
    for records in read_segments(store, segments):
        for record in records:
            if (record.key, record.step) not in curves.known:
                curves.known.add((record.key, record.step))
                points.append(Point(record.key, record.value, record.step, record.timestamp_ms))
    return downsampled(points, curves.seen, total_steps)


def shipped(run: TrackedRun) -> ShippedNote:
    """The record of what was sent, from a tag of the MLflow run; empty if it cannot be parsed."""
    try:
        record: ShippedNote = json.loads(run.tags.get(SHIPPED, "{}"))
    except ValueError:
        return {}
    return record
