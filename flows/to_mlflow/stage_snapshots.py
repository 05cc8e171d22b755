"""Run snapshots of runs and pipelines, read from the store alone, so that they can be sent to MLflow at any time.

Params are the settings that users filter by and compare; the whole config is sent as a file. Imports no MLflow and no torch.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from vitline.flows.catalog.records import AttemptRecord, Origin, PipelineRecord, attempt_records, read_pipeline
from vitline.flows.catalog.stored_configs import JSON, PreparationFile, RunFile, StoredTraining, TrainingFile, stage_of
from vitline.flows.nights.night_page import night_markdown
from vitline.flows.nights.night_record import read_night
from vitline.flows.plans.held_out import score_text
from vitline.flows.to_mlflow.evaluation_snapshot import show_evaluation
from vitline.flows.to_mlflow.prediction_snapshot import show_prediction
from vitline.flows.to_mlflow.run_snapshot import (
    MODEL_PARAMS,
    RunView,
    corpus_use,
    makers,
    plain,
    registered_model,
    stored_manifest,
)
from vitline.infra.config import canonical_json, digest_of, flatten
from vitline.infra.night import night_text
from vitline.infra.runs.run_state import NO_STATE, WAITING, RunStateRecord, read_state
from vitline.infra.runs.segments import list_segments, read_segments
from vitline.infra.storage import Store, json_bytes, open_store
from vitline.vit.corpora.training_corpora import MixtureRecord
from vitline.vit.published.model_record import model_record
from vitline.vit.run.branch import branches_of
from vitline.vit.run.run_spec import MIXTURE_KEY, StartRecord, read_progress, read_starts

TRAIN_PARAMS = [
    *(f"model.{name}" for name in MODEL_PARAMS),
    "model.pool",
    "model.pos_embed",
    "model.stochastic_depth_rate",
    "model.dropout_rate",
    "input.global_batch_size",
    "input.num_lanes",
    "input.shuffle_window",
    "input.augment.train_crop",
    "input.augment.flip",
    "optim.optimizer",
    "optim.optimizer_scope",
    "optim.peak_lr",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.weight_decay",
    "optim.layer_decay",
    "optim.frozen",
    "optim.head_first_steps",
    "optim.clip_norm",
    "optim.beta2",
    "loss",
    "label_smoothing",
    "masked_patches.target",
    "masked_patches.rate",
    "total_steps",
    "seed",
    "precision",
    "average_decay",
    "spike_guard.action",
]
EXECUTION_PARAMS = ("num_workers", "micro_batch_size", "compile")
MAX_SPIKE_PAGES = 20
"""Newest pages of spikes that are sent; the store has all."""
# Limit of the params of one request: a form has at most 15 fields, but `overrides` may hold many.
MAX_REQUEST_PARAMS = 20


def stage_snapshot(root: Store, key: str) -> RunView | None:
    """The run snapshot of a run in its present state; None before its first attempt."""
    run = root.child(f"runs/{key}")
    config: RunFile | None = run.read_json_or_none("config.json")
    state, attempts = read_state(run), attempt_records(run)
    if config is None or (state is None and not attempts):
        return None
    state, stage = state or NO_STATE, stage_of(config)
    ended = state["state"] != "running"
    newer = attempts and attempts[-1].attempt > state["attempt"]
    if newer:  # the next attempt was submitted and has not written its state yet
        state, ended = NO_STATE, False
    word = WAITING if newer or (not ended and (read_progress(run) or {}).get("waiting_for")) else state["state"]
    end_s = state["updated_at"] if ended else None
    snapshot = RunView(
        key=key,
        stage=stage,
        store_uri=run.uri,
        state=word,
        start_ms=_ms(started_at(run, state, attempts)),
        end_ms=_ms(end_s) if end_s else None,
        tags={"vitline.stage": stage, "vitline.state": word, "vitline.reason": state.get("reason")},
        files={"config.json": json_bytes(config)} | ({"state.json": json_bytes(state)} if ended else {}),
    )
    add_origin(snapshot, attempts)
    if "config" in config:
        show_training(snapshot, run, config, state)
    elif "requests" in config:
        show_preparation(snapshot, root, config, state)
    elif "top_k" in config:
        show_prediction(snapshot, config, state)
    else:
        show_evaluation(snapshot, root, config, state)
    snapshot.drop_empty()
    return snapshot


def started_at(run: Store, state: RunStateRecord, attempts: Sequence[AttemptRecord]) -> float:
    """Start of the first attempt in Unix seconds, or the earliest time that the store has of the run."""
    if attempts:
        return attempts[0].started_at
    if starts := read_starts(run):
        return min(start["at"] for start in starts)
    for segment in list_segments(run):  # the first may be empty, which closes the journal of an attempt
        for record in read_segments(run, [segment])[0]:
            return record.timestamp_ms / 1000
    return state["updated_at"] or time.time()


def add_origin(snapshot: RunView, attempts: Sequence[AttemptRecord]) -> None:
    """Adds the origin of the first attempt and the job of the last."""
    if not attempts:
        return
    first, last = attempts[0], attempts[-1]
    snapshot.pipeline = first.origin.pipeline
    snapshot.tags |= {
        "mlflow.user": first.owner.split("@")[0],
        "vitline.attempts": last.attempt,
        "vitline.ray_job_id": last.job_id,
    } | origin_tags(first.origin)
    job = f"**Ray job:** [{last.job_id}]({last.ray_address.rstrip('/')}/#/jobs/{last.job_id})"
    if not last.ray_address:  # small work without a configured cluster
        job = f"**Job:** {last.job_id}, a process of {last.owner}"
    snapshot.facts += [*origin_facts(first.origin), f"{job}, attempt {last.attempt}"]


def origin_tags(origin: Origin) -> JSON:
    return {
        "vitline.trigger": origin.trigger,
        "vitline.deployment": origin.deployment,
        "vitline.name": origin.name,
        "vitline.flow_run_id": origin.flow_run_id,
        "vitline.flow_run_url": origin.flow_run_url,
        "vitline.pipeline": origin.pipeline,
    }


def origin_facts(origin: Origin) -> list[str]:
    if not origin.flow_run_url:
        return [f"**Requested by:** {origin.trigger}"]
    name = origin.deployment or "flow run"
    return [f"**Requested by:** [{name}]({origin.flow_run_url}) in Prefect ({origin.trigger})"]


def show_training(snapshot: RunView, run: Store, spec: TrainingFile, state: RunStateRecord) -> None:
    """A pre-training or fine-tuning: recipe, corpus, length of the curves and published model."""
    config = spec["config"]
    recipe, execution = config["recipe"], config["execution"]
    corpora = trained_on(config)
    snapshot.total_steps = recipe["total_steps"]
    snapshot.params = training_params(config, corpora)
    snapshot.tags |= {
        "vitline.config_digest": digest_of(recipe),
        "vitline.corpus_digest": spec["inputs"]["corpus"],
        "vitline.night": (night := spec.get("night")) and night_text(datetime.fromisoformat(night)),
        "vitline.checkpoint_uri": run.uri_of("checkpoints"),
        "vitline.model_uri": state.get("model"),
        "vitline.spikes": len(state.get("spikes", ())) or None,
        "mlflow.source.name": f"vitline {config['stage']}",
        "mlflow.source.git.commit": code_commit(run),
    }
    contexts = {"train": config["split"], "val": config["val_split"]}
    snapshot.corpora = [
        corpus_use(uri, manifest, context, split)
        for uri, manifest in corpora.items()
        for context, split in contexts.items()
        if manifest and split and split in manifest["splits"]
    ]
    if run.exists(MIXTURE_KEY):
        mixture: MixtureRecord = run.read_json(MIXTURE_KEY)
        snapshot.params |= {"class_map_digest": mixture["class_map_digest"], "num_classes": len(mixture["classes"])}
        snapshot.files[MIXTURE_KEY] = json_bytes(mixture)
    if config["init_model"]:
        snapshot.model_inputs = makers([model_record(config["init_model"])])
    if parent := spec["inputs"].get("parent"):
        snapshot.branch_of = parent.rpartition("@")[0]
        snapshot.tags["vitline.parent"] = parent
        snapshot.related[snapshot.branch_of] = f"**Branch of:** {{run}} at step {config['parent']['step']:,}"
    for key, step in branches_of(run).items():
        snapshot.related[key] = f"**Branched into:** {{run}} at step {step:,}"
    if run.exists("inputs.png"):
        snapshot.files["inputs.png"] = run.read("inputs.png")
    if spikes := [key for key in run.list("spikes/") if key.endswith(".html")]:
        snapshot.files |= {key: run.read(key) for key in spikes[-MAX_SPIKE_PAGES:]}
    if state.get("spikes"):
        snapshot.facts += [spikes_fact(state["spikes"])]
    # Figures and their page; their numbers are large and stay in the store.
    figures = [key for key in state.get("inspection", ()) if key.endswith((".png", ".html"))]
    snapshot.files |= {key: run.read(key) for key in figures}
    images = recipe["total_steps"] * recipe["input"]["global_batch_size"]
    snapshot.facts += [
        f"**Plan:** {recipe['total_steps']:,} steps x {recipe['input']['global_batch_size']:,} = {images:,} images, "
        f"{execution['num_workers']} worker{'s' * (execution['num_workers'] > 1)}"
    ]
    if state["state"] == "finished" and state.get("model"):
        score = score_text(state, labelled=recipe.get("masked_patches") is None)
        snapshot.facts += [f"**Held-out images:** {score}"] if score else []
        tags = {"vitline.run_key": snapshot.key, "vitline.corpus_digest": snapshot.tags["vitline.corpus_digest"]}
        images_seen = state.get("images_seen", 0)
        snapshot.model = registered_model(state["model"], state["updated_at"], state["step"], images_seen, score, tags)


def spikes_fact(steps: Sequence[int]) -> str:
    """The steps of the spikes, the newest ten, as a line of the description."""
    shown = ", ".join(f"{step:,}" for step in steps[-10:])
    return f"**Spikes:** {len(steps)}, at step{'s' * (len(steps) > 1)} {'... ' * (len(steps) > 10)}{shown}; pictures in `spikes/`"


def trained_on(config: StoredTraining) -> dict[str, JSON | None]:
    """The manifests of the corpora of a training by URI; None for one that was deleted."""
    mixture = config.get("mixture")
    uris = [each["corpus"] for each in mixture["corpora"]] if mixture else [config["corpus"]]
    return {uri: stored_manifest(uri) for uri in uris}


def training_params(config: StoredTraining, corpora: Mapping[str, JSON | None]) -> JSON:
    """The params of a training; `total_images` is the budget, which should be equal when two recipes are compared."""
    flat = flatten(config["recipe"])
    init = config["init_model"]
    images = config["recipe"]["total_steps"] * config["recipe"]["input"]["global_batch_size"]
    return {
        **{name: plain(flat.get(name)) for name in TRAIN_PARAMS},
        **{f"execution.{name}": config["execution"].get(name) for name in EXECUTION_PARAMS},
        **corpus_params(config, corpora),
        "total_images": images,
        "init_model": "/".join(init.rstrip("/").split("/")[-2:]) if init else None,
    }


def corpus_params(config: StoredTraining, corpora: Mapping[str, JSON | None]) -> JSON:
    """Name and version of the corpus and its classes; of a mixture names and versions of all, weights and class map."""
    found = [manifest for manifest in corpora.values() if manifest]
    names = {"corpus": " + ".join(m["name"] for m in found), "corpus_version": " + ".join(m["version"] for m in found)}
    if mixture := config.get("mixture"):
        weights = plain([each["weight"] for each in mixture["corpora"]])
        return {**names, "mixture_weights": weights, "class_map": mixture["class_map"]}
    return {**names, "num_classes": found[0]["num_classes"]} if found else {}


def show_preparation(snapshot: RunView, root: Store, spec: PreparationFile, state: RunStateRecord) -> None:
    """Prepared corpora: images accepted and refused, bytes, leakage, seconds, rate; the step is the number of shards. Reports
    and statistics are sent as files."""
    snapshot.params = {"corpora": ", ".join(request["name"] for request in spec["requests"])}
    for request in spec["requests"]:
        snapshot.params[f"{request['name']}.source"] = request["source"]["kind"]
    snapshot.tags |= {
        "mlflow.source.name": "vitline prepare",
        "vitline.config_digest": digest_of([r.get("recipe") for r in spec["requests"]]),
    }
    made = {
        name: root.uri_of(f"corpora/{name}/{corpus['version']}") for name, corpus in state.get("corpora", {}).items()
    }
    manifests = {uri: m for uri in made.values() if (m := stored_manifest(uri))}
    if not manifests:
        return
    snapshot.corpora = [corpus_use(uri, manifest, "prepared", None) for uri, manifest in manifests.items()]
    digests = [manifest["digest"] for manifest in manifests.values()]
    snapshot.tags["vitline.corpus_digest"] = digests[0] if len(digests) == 1 else digest_of(digests)
    snapshot.facts += [f"**Corpus {m['name']}:** `{uri}`" for uri, m in manifests.items()]
    shards = sum(s["num_shards"] for m in manifests.values() for p in m["splits"].values() for s in p["segments"])
    total: dict[str, float] = {}
    for uri, manifest in manifests.items():
        counts, files = manifest["counts"], corpus_files(uri)
        own: dict[str, float] = {"images_accepted": counts["num_accepted"], "images_refused": counts["num_refused"]}
        own |= duplicates_and_leakage(json.loads(files.get("stats.json", b"{}")))
        folder = f"{manifest['name']}/" if len(manifests) > 1 else ""
        snapshot.files |= {folder + name: data for name, data in files.items()}
        if len(manifests) > 1:
            snapshot.values |= {f"data/{manifest['name']}/{k}": (v, shards) for k, v in own.items()}
        for name, value in {**own, "bytes": counts["num_bytes"]}.items():
            total[name] = total.get(name, 0) + value
    snapshot.values |= {f"data/{name}": (value, shards) for name, value in total.items()}
    if snapshot.end_ms:
        seconds = max((snapshot.end_ms - snapshot.start_ms) / 1000, 1e-3)
        rate = (total["images_accepted"] + total["images_refused"]) / seconds
        snapshot.values |= {"time/prepare_s": (seconds, shards), "throughput/images_per_s": (rate, shards)}


def duplicates_and_leakage(stats: JSON) -> dict[str, float]:
    """Numbers of duplicate images, and of remaining images that match one of an evaluation set."""
    if not stats:
        return {}
    kinds = ("same_file", "same_pixels", "near")
    leaks = [found["count"] - found["num_left_out"] for found in stats["leakage"].values()]
    return {
        "images_duplicate": sum(stats["duplicates"].get(kind, {"count": 0})["count"] for kind in kinds),
        **({"images_leaked": sum(leaks)} if stats["compared"] else {}),
    }


def corpus_files(uri: str) -> dict[str, bytes]:
    """Report and statistics of a corpus, as far as they exist."""
    corpus, files = open_store(uri), {}
    for name in ("report.html", "stats.json"):
        with contextlib.suppress(FileNotFoundError):
            files[name] = corpus.read(name)
    return files


def pipeline_snapshot(root: Store, key: str) -> tuple[RunView, PipelineRecord]:
    """The run snapshot of a pipeline: headline metrics, seconds of its stages, and the params of its trainings.

    Raises FileNotFoundError if there is no such pipeline.
    """
    record = read_pipeline(root, key)
    ended, step = record.state != "running", record.images_seen or 0
    snapshot = RunView(
        key=key,
        stage="pretrain-then-transfer",
        store_uri=root.uri_of(f"pipelines/{key}.json"),
        state=record.state,
        start_ms=_ms(record.started_at),
        end_ms=_ms(record.updated_at) if ended else None,
        tags=origin_tags(record.origin)
        | {
            "vitline.stage": "pretrain-then-transfer",
            "vitline.pipeline": key,
            "vitline.state": record.state,
            "vitline.reason": record.reason,
            "vitline.night": record.night and night_text(record.night),
            "vitline.model_uri": record.model,
            "vitline.model_digest": record.model_digest,
            "vitline.report_uri": record.report,
            "vitline.corpus_digest": next(iter(record.corpora.values()), None),
            "mlflow.source.name": "vitline pretrain-then-transfer",
            "mlflow.user": user_of(root, record),
        },
        files={"request.json": json_bytes(record.request)},
        facts=origin_facts(record.origin),
    )
    snapshot.values = {name: (value, step) for name, value in record.metrics.items()}
    for name, stages in record.stages_by_name.items():
        if worked := [stage.wall_s for stage in stages if not stage.reused]:
            snapshot.values |= {f"time/{name}_s": (sum(worked), 0)}
    for name, stage in record.first_stages.items():
        # The long run's params are those of its branch, which is the pre-training; of several evaluations one has params here.
        if name != "advance" and "/" not in name:
            add_stage(snapshot, root, name, stage.run_key)
    add_verdict(snapshot, root, record)
    # Params of the stages are not repeated.
    fields = {k: v if isinstance(v, dict) else plain(v) for k, v in record.request.items() if k not in snapshot.params}
    shown = {k: canonical_json(v) if isinstance(v, dict) else v for k, v in fields.items() if v not in ({}, "")}
    snapshot.params |= {f"request.{name}": value for name, value in list(shown.items())[:MAX_REQUEST_PARAMS]}
    if record.report:
        folder, _, name = record.report.rpartition("/")
        if open_store(folder).exists(name):
            snapshot.files["report.html"] = open_store(folder).read(name)
        snapshot.facts += [f"**Report:** `{record.report}`, and `report.html` among the artifacts"]
    snapshot.drop_empty()
    return snapshot, record


def add_verdict(snapshot: RunView, root: Store, record: PipelineRecord) -> None:
    """Adds the verdict of a night: its word and sentence as tags, the differences as metrics, the page as a file."""
    night = read_night(root, record.name, record.night) if record.night else None
    if night is None or night.verdict is None or night.pipeline != record.key:
        return
    snapshot.tags |= {"vitline.verdict": night.verdict.word, "vitline.verdict.sentence": night.sentence}
    if night.gate is not None:
        snapshot.tags |= {"vitline.gate": night.gate.reason}
    snapshot.facts.insert(0, f"**Verdict:** {night.sentence}")
    snapshot.files["verdict.md"] = night_markdown(night).encode()
    step = record.images_seen or 0
    for against in night.verdict.against:
        snapshot.tags[f"vitline.verdict.{against.who.replace(' ', '_')}"] = against.word
        if against.differences:
            name = f"night/{against.who.replace(' ', '_')}/difference"
            snapshot.values[name] = (against.whole.value, step)


def user_of(root: Store, record: PipelineRecord) -> str | None:
    """The owner of the first attempt that this pipeline started."""
    for stage in record.stages:
        for attempt in attempt_records(root.child(f"runs/{stage.run_key}")) if stage.run_key else ():
            if attempt.origin.pipeline == record.key:
                return attempt.owner.split("@")[0]
    return None


def add_stage(snapshot: RunView, root: Store, stage: str, key: str | None) -> None:
    """Adds the params of a stage to the parent: those of the pre-training by name, those of other stages with a prefix."""
    config: RunFile | None = root.child(f"runs/{key}").read_json_or_none("config.json") if key else None
    if config is None:
        return
    if "config" in config:
        training = config["config"]
        corpora = trained_on(training)
        prefix = "" if stage == "pretrain" else f"{stage}."
        snapshot.params |= {f"{prefix}{name}": value for name, value in training_params(training, corpora).items()}
        if stage == "pretrain":
            snapshot.tags["vitline.config_digest"] = digest_of(training["recipe"])
            snapshot.tags["vitline.corpus_digest"] = config["inputs"]["corpus"]  # of a mixture that of all its corpora
            snapshot.corpora = [
                corpus_use(uri, manifest, "train", training["split"]) for uri, manifest in corpora.items() if manifest
            ]
            digest = snapshot.tags.get("vitline.model_digest")
            snapshot.model_inputs = {digest: key} if digest and key else {}
    elif "tasks" in config:
        snapshot.params |= {
            "transfer.protocol": config["protocol"]["name"],
            "transfer.tasks": ", ".join(task["name"] for task in config["tasks"]),
            "transfer.steps": plain(config["protocol"].get("total_steps")),
        }


def code_commit(run: Store) -> str | None:
    """Commit of the git checkout of the last start; None if there was none."""
    starts = run.list("starts/")
    if not starts:
        return None
    last: StartRecord = run.read_json(starts[-1])
    return last["versions"].get("commit")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
