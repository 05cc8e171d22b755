"""Run snapshots: what one run in the store looks like as an MLflow run, with its corpora and models. Imports no MLflow."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitline.flows.catalog.stored_configs import JSON
from vitline.infra.config import canonical_json, digest_of
from vitline.infra.mlflow.entities import DatasetUse, Model
from vitline.infra.runs.run_state import MLFLOW_WAITING, OUTCOMES, WAITING
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.published.model_record import CARD, CONFIG, ModelRecord, file_key, published_record, read_contract
from vitline.vit.published.registry_model import registry_files

Values = dict[str, tuple[float, int]]
"""Value and step by metric."""

MODEL_PARAMS = (
    "architecture",
    "stages",
    "width_factor",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_dim",
    "patch_size_px",
    "image_size_px",
)


@dataclass(frozen=True)
class Child:
    """A part of a run with a child run of its own in MLflow. It has the state and times of its parent."""

    name: str
    """Name in MLflow's lists."""
    slug: str
    """Unique among the children of the run; it never changes."""
    tags: JSON
    params: JSON
    values: Values
    curves: Sequence[tuple[str, float, int]] = ()
    """Metric, value and step of points that have no time of their own."""
    corpora: Sequence[DatasetUse] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    stored_files: Mapping[str, str] = field(default_factory=dict)
    """Files that never change, as keys below the root by file name. They are read when they are sent."""
    models: Sequence[Model] = ()
    """Models that its trials have published."""
    facts: Sequence[str] = ()
    table: str = ""
    """Markdown for the description of the MLflow run."""

    @property
    def digest(self) -> str:
        """Digest of everything that is sent."""
        files = {name: digest_of(data.hex()) for name, data in self.files.items()}
        models = [signed(model) for model in self.models]
        return digest_of(canonical({**vars(self), "files": files, "models": models}))[:16]


@dataclass
class RunView:
    """One run in the store as an MLflow run. `values` are logged at the time of the run's end; curves are in the journal."""

    key: str
    stage: str
    store_uri: str
    state: str
    start_ms: int
    end_ms: int | None
    tags: JSON
    params: JSON = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    corpora: Sequence[DatasetUse] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    model: Model | None = None
    model_inputs: Mapping[str, str] = field(default_factory=dict)
    """The models that this run reads: run key of the training by digest of the model."""
    pipeline: str | None = None
    """Key of the pipeline that this run was made for."""
    branch_of: str | None = None
    """Run key of the parent of a branch."""
    related: dict[str, str] = field(default_factory=dict)
    """Lines of the description about other runs by their keys: `{run}` becomes a link."""
    total_steps: int = 0
    """Number of steps of the curves."""
    facts: list[str] = field(default_factory=list)
    """Lines of the description, in Markdown."""
    children: Sequence[Child] = ()

    def drop_empty(self) -> None:
        """Leaves out tags and params without a value."""
        self.tags = {name: str(value) for name, value in self.tags.items() if value not in (None, "")}
        self.params = {name: value for name, value in self.params.items() if value is not None}

    @property
    def name(self) -> str:
        """Name in MLflow's lists: the name that a person typed, the run key, and the seed."""
        seed = self.params.get("seed", self.params.get("request.seed"))
        typed = self.tags.get("vitline.name")
        return ", ".join(part for part in (typed, self.key, None if seed is None else f"seed {seed}") if part)

    @property
    def experiment(self) -> str:
        return f"{Settings().project}/{self.stage}"

    @property
    def status(self) -> str:
        return MLFLOW_WAITING if self.state == WAITING else OUTCOMES[self.state].mlflow_status  # type: ignore[index]

    @property
    def digest(self) -> str:
        """Digest of everything that is sent except the journal. An unchanged snapshot is not sent again."""
        files = {name: digest_of(data.hex()) for name, data in self.files.items()}
        model = self.model and signed(self.model)
        shown = [self.tags, self.params, self.values, self.corpora, self.model_inputs, self.pipeline, self.facts]
        shown += [child.digest for child in self.children]
        return digest_of([self.status, self.start_ms, self.end_ms, files, model, canonical(shown)])[:16]


def signed(model: Model) -> list[Any]:
    """Changes with what is sent of a model."""
    return [model.digest, model.finished_at, model.tags, sorted(model.files)]


def registered_model(
    uri: str, finished_at: float, step: int, images_seen: int, score: str, tags: Mapping[str, str]
) -> Model | None:
    """The published model at a URI as a version of MLflow's registry, with its score as text; None if it was deleted."""
    store = open_store(uri)
    if not store.exists(CONFIG):
        return None
    record = published_record(store)
    name, version = store.uri.rstrip("/").split("/")[-2:]
    return Model(
        name=name,
        version=version,
        uri=store.uri,
        digest=record["digest"],
        finished_at=finished_at,
        step=step,
        tags={**tags, "vitline.model_uri": store.uri, "vitline.model_digest": record["digest"]},
        params={name: plain(record["model"][name]) for name in MODEL_PARAMS if name in record["model"]}
        | {"num_classes": record["num_classes"], "images_seen": images_seen},
        files={
            **registry_files(store.uri, record, read_contract(store, record)),
            CARD: store.read(file_key(record, CARD)),
        },
        summary=f"{f'{score}, ' if score else ''}{images_seen:,} images seen; weights at {store.uri}",
    )


def canonical(value: Any) -> str:
    return canonical_json(json_ready(value))


def json_ready(value: Any) -> Any:
    if isinstance(value, DatasetUse):
        return vars(value)
    if isinstance(value, Mapping):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    return repr(value) if isinstance(value, float) else value


def stored_manifest(uri: str) -> JSON | None:
    """The manifest of the corpus at a URI; None if it was deleted."""
    manifest: JSON | None = open_store(uri).read_json_or_none("manifest.json")
    return manifest


def corpus_use(uri: str, manifest: JSON, context: str, split: str | None) -> DatasetUse:
    """A corpus in one use. MLflow identifies a data set by name and digest, so the names of other uses than training and
    preparation end in the split."""
    splits = {name: part["num_rows"] for name, part in manifest["splits"].items()}
    profile = {
        "num_rows": splits[split] if split in splits else manifest["counts"]["num_accepted"],
        "num_classes": manifest["num_classes"],
        "splits": splits,
        "images_accepted": manifest["counts"]["num_accepted"],
        "images_refused": manifest["counts"]["num_refused"],
        "version": manifest["version"],
    }
    name = manifest["name"] if context in ("train", "prepared") else f"{manifest['name']}/{split}"
    return DatasetUse(name, manifest["digest"], uri, context, profile)


def makers(configs: Iterable[ModelRecord | None]) -> dict[str, str]:
    """Run keys of trainings by the digest of their published model, from model configs that name their run."""
    return {c["digest"]: key for c in configs if c and (key := c.get("provenance", {}).get("run_key"))}


def plain(value: Any) -> Any:
    """A value as an MLflow param: lists are joined by commas."""
    return ", ".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else value
