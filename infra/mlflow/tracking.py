"""The only module that imports MLflow: sends runs, points, data sets and models. Sending again changes nothing.

It uses explicit run ids and no active run. Flows and training never import it, because they never wait for MLflow. Every method
raises MlflowException if the server is unavailable or refuses; the caller tries again later. One sender at a time works on a root
(`flows/to_mlflow/send.py`). One that was suspended, and resumes after another has taken over, learns it from the ids in the store
and deletes what it has just created.
"""

import contextlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.exceptions import MlflowException, RestException

from vitline.infra.mlflow.entities import DatasetUse, Model, Point
from vitline.infra.mlflow.mlflow_private import EXPERIMENT_TAGS
from vitline.infra.mlflow.pages import run_url, version_url
from vitline.infra.mlflow.saved_view import changed_tags
from vitline.infra.mlflow.tracking_ids import RUN, IdsChanged, TrackingIds
from vitline.infra.redact import redact
from vitline.infra.settings import Settings

RUN_KEY, STORE_URI = "vitline.run_key", "vitline.store_uri"
CANDIDATE = "candidate"
MAX_POINTS_PER_KEY = 2000  # points of one curve; MLflow's pages are slow with more
_MAX_POINTS_A_CALL, _MAX_TAG, _MAX_PARAM, _MAX_DIGEST = 1000, 5000, 500, 36
_ABOUT_MODELS = (
    "Published by vitline. A version loads as a pyfunc and can be served. Its weights are in the store: the artifact "
    "`pointer.json` has their URI. `candidate` is the version whose training ended last, `champion` the one that "
    "later nights are compared with."
)
CANDIDATE_BY = "vitline.candidate_by"
CHAMPION, CHAMPION_BY = "champion", "vitline.champion_by"
"""The alias, and the tag of a version that says who promoted it and why."""
GATE = "vitline.gate"
_CHAMPION_NUMBER, _CHAMPION_VERSION = "vitline.champion_number", "vitline.champion_version"
_RULE = "its training ended last of all versions"
_OF_RULE = f"; `{CANDIDATE}`, because {_RULE}"
_TEXT = (".json", ".md", ".html", ".txt", ".csv")


@dataclass(frozen=True)
class ModelRef:
    model_id: str
    version: str
    url: str


@dataclass
class TrackedRun:
    """An MLflow run on the server. `tags` and `params` are updated with what is sent."""

    run_id: str
    experiment_id: str
    url: str
    status: str
    end_ms: int | None
    tags: dict[str, str]
    params: dict[str, str]
    model_outputs: set[str] = field(default_factory=set)


class Tracking:
    """A client of one server. Everything it sends passes `redact` with `secrets` first."""

    def __init__(self, uri: str, secrets: Iterable[str] = ()) -> None:
        self.uri = uri.rstrip("/")
        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self._secrets = frozenset(secrets)
        self._experiments: dict[str, str] = {}

    def ping(self) -> None:
        """Raises MlflowException if the server does not answer."""
        self._client.search_experiments(max_results=1)

    # Runs

    def run(
        self,
        ids: TrackingIds,
        experiment: str,
        key: str,
        store_uri: str,
        start_ms: int,
        tags: Mapping[str, str],
        name: str | None = None,
    ) -> TrackedRun | None:
        """The MLflow run of a run key: the one named by `ids`, else one found by its tags, else a new one.

        None if somebody has deleted it in MLflow; it is not created again. A new run is called `name`, or by its run key.
        """
        known = ids.read().get(RUN)
        if known is not None and (found := self._find(lambda: self._client.get_run(known))) is not None:
            return self._tracked(found) if found.info.lifecycle_stage == "active" else None
        experiment_id = self._experiment(experiment)
        created = not (same := self._search_runs(experiment_id, key, store_uri))
        if created:
            about = self._clean_all({**tags, RUN_KEY: key, STORE_URI: store_uri})
            same = [self._client.create_run(experiment_id, start_ms, about, name or key).info.run_id]
        run_id = same[0]
        undo = partial(self._client.delete_run, run_id) if created else None
        self._save(ids, undo, {RUN: run_id, "url": run_url(self.uri, experiment_id, run_id)})
        tracked = self._tracked(self._client.get_run(run_id))
        self.delete_copies(tracked)
        return tracked

    def delete_copies(self, run: TrackedRun) -> None:
        """Deletes other runs of the same key, which a server made late, or a sender that had lost its lease."""
        key, store_uri = run.tags.get(RUN_KEY, ""), run.tags.get(STORE_URI, "")
        for run_id in self._search_runs(run.experiment_id, key, store_uri):
            if run_id != run.run_id:
                self._client.delete_run(run_id)

    def put_tags(self, run: TrackedRun, tags: Mapping[str, str]) -> None:
        """Sets the tags that have another value."""
        changed = {k: v for k, v in self._clean_all(tags).items() if run.tags.get(k) != v}
        if changed:
            self._client.log_batch(run.run_id, tags=[RunTag(k, v) for k, v in changed.items()])
            run.tags |= changed

    def put_params(self, run: TrackedRun, params: Mapping[str, Any]) -> None:
        """Sets new params. MLflow cannot change a param, so a changed one becomes a tag `vitline.param.<name>`."""
        texts = {k: self._clean(str(v), _MAX_PARAM) for k, v in params.items()}
        new = {k: v for k, v in texts.items() if k not in run.params}
        if new:
            self._client.log_batch(run.run_id, params=[Param(k, v) for k, v in new.items()])
            run.params |= new
        self.put_tags(run, {f"vitline.param.{k}": v for k, v in texts.items() if run.params[k] != v})

    def put_status(self, run: TrackedRun, status: str, end_ms: int | None) -> None:
        """Sets the status: RUNNING, or the end status with its time."""
        if end_ms is None:
            if run.status != status:
                self._client.update_run(run.run_id, status=status)
        elif (run.status, run.end_ms) != (status, end_ms):
            self._client.set_terminated(run.run_id, status, end_ms)
        run.status, run.end_ms = status, end_ms

    def log_points(self, run: TrackedRun, points: Sequence[Point], model_id: str | None = None) -> None:
        """Sends points. The server's SQL store keeps equal points once."""
        for first in range(0, len(points), _MAX_POINTS_A_CALL):
            part = points[first : first + _MAX_POINTS_A_CALL]
            metrics = [Metric(p.key, p.value, p.timestamp_ms, p.step, model_id=model_id) for p in part]
            self._client.log_batch(run.run_id, metrics=metrics)

    def put_points_once(self, run: TrackedRun, points: Sequence[Point], model_id: str | None = None) -> None:
        """Sends the points whose (key, step) the run does not have. For points whose time differs each time they are sent."""
        keys = {point.key for point in points}
        there = {(key, m.step) for key in keys for m in self._client.get_metric_history(run.run_id, key)}
        self.log_points(run, [p for p in points if (p.key, p.step) not in there], model_id)

    def put_data(self, run: TrackedRun, uses: Sequence[DatasetUse]) -> None:
        """Logs the corpora of a run. MLflow allows 36 characters of a digest, so a tag has the whole digest."""
        if not uses:
            return
        inputs = []
        for use in uses:
            uri = self._clean(use.uri)
            scheme = uri.partition("://")[0] if "://" in uri else "file"
            kind = "local" if scheme == "file" else scheme.partition("+")[0]
            profile = json.dumps(use.profile, sort_keys=True)
            dataset = Dataset(use.name, use.digest[:_MAX_DIGEST], kind, json.dumps({"uri": uri}), profile=profile)
            tags = {"mlflow.data.context": use.context, "vitline.corpus_digest": use.digest}
            inputs.append(DatasetInput(dataset, [InputTag(k, v) for k, v in tags.items()]))
        self._client.log_inputs(run.run_id, datasets=inputs)

    def put_files(self, run: TrackedRun, files: Mapping[str, bytes]) -> None:
        """Uploads small files as artifacts of the run."""
        if files:
            with self._folder(files) as folder:
                self._client.log_artifacts(run.run_id, folder)

    def offer_view(self, experiment_id: str, metrics: Collection[str]) -> None:
        """Adds a saved view to the experiment that shows the headline metrics among `metrics` as columns (`saved_view.py`).

        A refusal of the server is ignored.
        """
        tags = self._client.get_experiment(experiment_id).tags
        with contextlib.suppress(RestException):
            for name, value in changed_tags(tags, metrics, int(time.time() * 1000), Settings().project).items():
                self._client.set_experiment_tag(experiment_id, name, value)

    # Models

    def publish(self, run: TrackedRun, ids: TrackingIds, model: Model) -> ModelRef:
        """Publishes the model as an MLflow LoggedModel of its run, and as a version in the registry that points to it.

        The newest version becomes the candidate.
        """
        tags = self._clean_all(model.tags)
        model_id = self._logged_model(run, ids, model, tags)
        self.log_points(run, model.points, model_id)
        if model_id not in run.model_outputs:
            self._client.log_outputs(run.run_id, [LoggedModelOutput(model_id, model.step)])
            run.model_outputs.add(model_id)
        version = self._version(run, ids, model, tags, model_id)
        self._move_candidate(model.name)
        return ModelRef(model_id, version, version_url(self.uri, model.name, version))

    def aliased(self, name: str, alias: str) -> str | None:
        """URI of the published model that has an alias; None if there is no such model or alias, or if vitline did not make
        the version."""
        try:
            return self._client.get_model_version_by_alias(name, alias).tags.get("vitline.model_uri")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise RuntimeError(f"MLflow at {redact(self.uri)} does not answer: {error}") from error

    def _logged_model(self, run: TrackedRun, ids: TrackingIds, model: Model, tags: dict[str, str]) -> str:
        kind = f"model {model.digest[:12]}"
        known, client = ids.read().get(kind), self._client
        found = self._find(lambda: client.get_logged_model(known)) if known else None
        if found is None:
            undo = None
            if not (same := self._logged_models(run, model)):
                params = self._clean_all(model.params)
                same = [client.create_logged_model(run.experiment_id, model.name, run.run_id, tags, params, "vit")]
                undo = partial(client.delete_logged_model, same[0].model_id)
            self._save(ids, undo, {kind: same[0].model_id})
            found = client.get_logged_model(same[0].model_id)
        for copy in self._logged_models(run, model):
            if copy.model_id != found.model_id:
                client.delete_logged_model(copy.model_id)
        ready = str(found.status) == "READY"
        if not ready or {*model.files} - {f.path for f in client.list_logged_model_artifacts(found.model_id)}:
            with self._folder(model.files) as folder:
                client.log_model_artifacts(found.model_id, folder)
        if not ready:
            client.finalize_logged_model(found.model_id, "READY")
        return found.model_id

    def _logged_models(self, run: TrackedRun, model: Model) -> Sequence[Any]:
        wanted = f"tags.`vitline.model_digest` = '{model.digest}'"
        found = self._client.search_logged_models([run.experiment_id], wanted)
        return [each for each in found if each.source_run_id == run.run_id]

    def _version(self, run: TrackedRun, ids: TrackingIds, model: Model, tags: dict[str, str], model_id: str) -> str:
        kind = f"version {model.digest[:12]}"
        known, client = ids.read().get(kind), self._client
        source = f"models:/{model_id}"
        version = known if known and self._find(lambda: client.get_model_version(model.name, known)) else None
        if version is None:
            if self._find(lambda: client.get_registered_model(model.name)) is None:
                client.create_registered_model(model.name, description=_ABOUT_MODELS)
            undo = None
            if not (same := [str(v.version) for v in self._versions(model.name) if v.source == source]):
                made = client.create_model_version(
                    model.name,
                    source,
                    run.run_id,
                    {**tags, "vitline.finished_at": f"{model.finished_at:.3f}"},
                    description=self._clean(model.summary),
                    await_creation_for=0,
                    model_id=model_id,
                )
                same = [str(made.version)]
                undo = partial(client.delete_model_version, model.name, same[0])
            version = min(same, key=int)
            self._save(ids, undo, {kind: version})
        for copy in self._versions(model.name):
            if copy.source == source and str(copy.version) != version:
                client.delete_model_version(model.name, copy.version)
        return version

    def _move_candidate(self, name: str) -> None:
        """Moves the alias to the newest version."""
        versions = self._versions(name)
        newest = max(versions, key=lambda v: (float(v.tags.get("vitline.finished_at", 0)), int(v.version)))
        aliases = self._client.get_registered_model(name).aliases
        if str(aliases.get(CANDIDATE)) != str(newest.version):
            self._client.set_registered_model_alias(name, CANDIDATE, newest.version)
        self._describe_candidate(name, versions, newest)

    def put_champion(self, name: str, digest: str, number: int, reason: str, by_hand: bool) -> None:
        """Moves the alias `champion` to the version of a model, and tags the version with the reason, once for each `number` of a
        champion. So an alias that a person moves in MLflow stays there until somebody promotes another model by hand. Does nothing
        before the model is in the registry."""
        version = self._version_of(name, digest)
        if version is None:
            return
        model = self._client.get_registered_model(name)
        if model.tags.get(_CHAMPION_NUMBER) == str(number):
            return
        self._client.set_model_version_tag(name, version, CHAMPION_BY, self._clean(reason))
        if by_hand or str(model.aliases.get(CHAMPION)) == str(model.tags.get(_CHAMPION_VERSION)):
            self._client.set_registered_model_tag(name, _CHAMPION_VERSION, version)
            self._client.set_registered_model_alias(name, CHAMPION, version)
        self._client.set_registered_model_tag(name, _CHAMPION_NUMBER, str(number))

    def put_gate(self, name: str, digest: str, reason: str) -> None:
        """Tags the version of a model with what the gate says of it. Does nothing before the model is in the registry."""
        if (version := self._version_of(name, digest)) is not None:
            self._client.set_model_version_tag(name, version, GATE, self._clean(reason))

    def _version_of(self, name: str, digest: str) -> str | None:
        found = [str(v.version) for v in self._versions(name) if v.tags.get("vitline.model_digest") == digest]
        return min(found, key=int) if found else None

    def _describe_candidate(self, name: str, versions: Sequence[Any], candidate: Any) -> None:
        """Writes the reason why a version is the candidate into its description and a tag, and removes it from others."""
        for version in versions:
            rule = _RULE if version is candidate else None
            description = (version.description or "").removesuffix(_OF_RULE) + (_OF_RULE if rule else "")
            if description != (version.description or ""):
                self._client.update_model_version(name, version.version, description)
            if rule and version.tags.get(CANDIDATE_BY) != rule:
                self._client.set_model_version_tag(name, version.version, CANDIDATE_BY, rule)
            if not rule and CANDIDATE_BY in version.tags:
                self._client.delete_model_version_tag(name, version.version, CANDIDATE_BY)

    def _versions(self, name: str) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self._client.search_model_versions(f"name = '{name}'", page_token=token)
            found, token = [*found, *page], page.token
            if not token:
                return found

    # Helpers

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            if self._client.get_experiment_by_name(name) is None:
                self._client.create_experiment(name, tags=EXPERIMENT_TAGS)
            found = self._client.get_experiment_by_name(name)
            assert found is not None
            if found.lifecycle_stage != "active":
                raise MlflowException(f"experiment {name!r} was deleted in MLflow. Restore it there to see its runs.")
            self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def _search_runs(self, experiment_id: str, key: str, store_uri: str) -> list[str]:
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_KEY}` = '{key}'", order_by=["start_time"])
        mine = self._clean(store_uri)
        return [run.info.run_id for run in found if run.data.tags.get(STORE_URI) == mine]

    def _tracked(self, run: Run) -> TrackedRun:
        info, data = run.info, run.data
        return TrackedRun(
            info.run_id,
            info.experiment_id,
            run_url(self.uri, info.experiment_id, info.run_id),
            info.status,
            info.end_time,
            dict(data.tags),
            dict(data.params),
            {m.model_id for m in (run.outputs and run.outputs.model_outputs) or ()},
        )

    def _find(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, or None if the server does not have the object: it was rebuilt, or somebody deleted it."""
        try:
            return call()
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _save(self, ids: TrackingIds, undo: Callable[[], Any] | None, names: Mapping[str, str]) -> None:
        """Saves ids. Raises IdsChanged if another sender has saved its own; then `undo` deletes what was created under these."""
        try:
            ids.save(names)
        except IdsChanged:
            saved = ids.read()
            if undo and not names.items() <= saved.items():  # they are equal where only the reply of the store was lost
                undo()
            raise

    def _folder(self, files: Mapping[str, bytes]) -> tempfile.TemporaryDirectory[str]:
        folder = tempfile.TemporaryDirectory(prefix="vitline-tracking-")
        for name, data in files.items():
            clean = self._clean(data.decode(), None).encode() if name.endswith(_TEXT) else data
            path = Path(folder.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(clean)
        return folder

    def _clean_all(self, texts: Mapping[str, Any]) -> dict[str, str]:
        return {k: self._clean(str(v)) for k, v in texts.items()}

    def _clean(self, text: str, limit: int | None = _MAX_TAG) -> str:
        clean = redact(text, self._secrets)
        return clean if limit is None or len(clean) <= limit else clean[: limit - 1] + "…"


def downsampled(points: Sequence[Point], seen: dict[str, set[int]], total_steps: int) -> list[Point]:
    """The points of curves to show: the run is cut into at most `MAX_POINTS_PER_KEY` parts, and of each part and key the
    first point is kept, and the last step.

    `seen` has the parts kept so far, by key. The choice depends on the order of the journal only.
    """
    width = -(-total_steps // (MAX_POINTS_PER_KEY - 2)) or 1
    kept = []
    for point in points:
        part = -1 if point.step == total_steps else -(-point.step // width)
        taken = seen.setdefault(point.key, set())
        if part not in taken:
            taken.add(part)
            kept.append(point)
    return kept


# Models that MLflow can serve


def save_served_model(
    directory: str | Path,
    code: str,
    artifacts: Mapping[str, str],
    example: bytes,
    requirements: Sequence[str],
    metadata: Mapping[str, Any],
) -> None:
    """Writes an MLflow model folder that contains code and no pickle.

    Input: rows with `image`. Output: rows with `classes` and `probabilities`, best first. `code` must call `serve_images`.
    `artifacts` are copied into the folder. `example` is one image. Raises MlflowException if the folder is not empty or
    the code fails.
    """
    # Imported here, because mlflow-skinny, which the sender uses, does not include pandas.
    import pandas
    from mlflow.environment_variables import MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR
    from mlflow.models import ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types.schema import Array, ColSpec, DataType, Schema, TensorSpec

    answer: list[ColSpec | TensorSpec] = [
        ColSpec(Array(DataType.string), "classes"),
        ColSpec(Array(DataType.double), "probabilities"),
    ]
    MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR.set(False)
    with tempfile.TemporaryDirectory(prefix="vitline-served-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Add type hints")  # the signature has the same information
        file = Path(folder, "served_model.py")
        file.write_text(code, encoding="utf-8")
        save_model(
            path=directory,
            python_model=file,
            artifacts=dict(artifacts),
            signature=ModelSignature(Schema([ColSpec(DataType.binary, "image")]), Schema(answer)),
            input_example=pandas.DataFrame({"image": [example]}),
            pip_requirements=list(requirements),
            metadata=dict(metadata),
        )


def serve_images(load: Callable[[str], Callable[[list[Any]], Sequence[Mapping[str, object]]]]) -> None:
    """Called by the code of a served model. `load` turns the artifact `model` into a function from images to predictions."""
    from mlflow.models import set_model
    from mlflow.pyfunc.model import PythonModel

    class ServedModel(PythonModel):
        def load_context(self, context: Any) -> None:
            self.answer = load(context.artifacts["model"])

        # No type hints, as MLflow would use them as a schema.
        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return self.answer(list(model_input["image"]))

    set_model(ServedModel())
