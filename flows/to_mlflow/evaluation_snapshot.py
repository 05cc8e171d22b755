"""The run snapshot of an evaluation: its scores, and a child run for each task and model.

A child holds what explains the score: the chosen setting and all settings that were tried, the loss of the final trial, and
the files about its predictions (`vit/evaluation/trial_files.py`). Imports no MLflow and no torch.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vitline.flows.catalog.stored_configs import JSON, EvaluationFile
from vitline.flows.to_mlflow.run_snapshot import (
    MODEL_PARAMS,
    Child,
    RunView,
    Values,
    corpus_use,
    makers,
    plain,
    registered_model,
    stored_manifest,
)
from vitline.infra.config import digest_of, flatten
from vitline.infra.html.tables import markdown
from vitline.infra.html.text import percent
from vitline.infra.mlflow.entities import DatasetUse, Model
from vitline.infra.runs.run_state import RunStateRecord
from vitline.infra.storage import Store, json_bytes
from vitline.vit.evaluation.evaluate import Score, final_result, kept_model
from vitline.vit.evaluation.reference.corruption_errors import corruption_metrics
from vitline.vit.evaluation.reference.report import group_means, metrics_over_seeds
from vitline.vit.evaluation.tasks import benchmark_name
from vitline.vit.evaluation.trials import model_label
from vitline.vit.published.model_record import model_record

PROTOCOL_PARAMS = (
    "kind",
    "name",
    "splits",
    "total_steps",
    "global_batch_size",
    "learning_rates",
    "optim.optimizer",
    "optim.optimizer_scope",
    "optim.weight_decay",
    "optim.layer_decay",
    "optim.frozen",
    "optim.head_first_steps",
    "image_size_px",
    "seed_statistic",
    "method",
    "shots",
)
NOT_SENT = (".parquet",)
"""Files of a trial that stay in the store, because only programs read them."""


def show_evaluation(snapshot: RunView, root: Store, spec: EvaluationFile, state: RunStateRecord) -> None:
    """Scores on tasks: a metric for each task and model, group means where all tasks are scored, and the children."""
    protocol, models = spec["protocol"], [model for model in spec["models"] if model]
    records = {model: record for model in models if (record := model_record(model))}
    first = records.get(models[0]) if models else None
    of_protocol = flatten(protocol)
    snapshot.params = {
        **{f"protocol.{name}": plain(of_protocol.get(name)) or None for name in PROTOCOL_PARAMS},
        **{f"model.{name}": plain(spec["architecture"].get(name)) for name in MODEL_PARAMS},
        "model": ", ".join(map(model_label, models)) or None,
        "tasks": ", ".join(task["name"] for task in spec["tasks"]),
        "control": None in spec["models"],
        "seed": spec["seed"],
        "num_seeds": spec.get("num_seeds"),
    }
    snapshot.tags |= {
        "vitline.config_digest": digest_of([protocol, spec["architecture"], spec["seed"]]),
        "vitline.model_uri": models[0] if models else None,
        "vitline.model_digest": first["digest"] if first else None,
        "mlflow.source.name": "vitline evaluate",
    }
    corpora = dict.fromkeys(task["corpus"] for task in spec["tasks"])
    manifests = {uri: manifest for uri in corpora if (manifest := stored_manifest(uri))}
    snapshot.corpora = [corpus_use(uri, manifest, "test", "test") for uri, manifest in manifests.items()]
    if digests := [manifest["digest"] for manifest in manifests.values()]:
        snapshot.tags["vitline.corpus_digest"] = digests[0] if len(digests) == 1 else digest_of(digests)
    snapshot.model_inputs = makers(records.values())
    scores = [Score.model_validate(score) for score in state.get("scores") or ()]
    images_seen = {model: record.get("provenance", {}).get("images_seen", 0) for model, record in records.items()}
    snapshot.values = score_values(scores, images_seen)
    snapshot.facts += [f"**Weights:** `{model}`" for model in models]
    uses = {corpus.digest: corpus for corpus in snapshot.corpora}
    snapshot.children = [
        score_child(
            root,
            part,
            child_name(part[0], models),
            uses,
            images_seen,
            kept_models(root, spec["run_key"], part) if spec.get("keep_models") else (),
        )
        for part in by_init(scores)
    ]


def score_values(scores: Sequence[Score], images_seen: Mapping[str, int]) -> Values:
    """Metrics by name (docs/generate/metrics.py), with the images that the model has seen as step, 0 for the control. Seeds
    are summed up as the protocol defines. Metrics of any model but the first have its version as a suffix, those of the
    control `_from_scratch`."""
    values: Values = {}
    models = list(dict.fromkeys(score.model for score in scores if score.model))
    for model in (*models, None):
        own = [score for score in scores if score.model == model]
        named = metrics_over_seeds(own)
        of_vtab = {
            benchmark_name(score.task): named[score.metric_name]
            for score in own
            if score.metric_name.startswith("vtab/")
        }
        suffix = "_from_scratch" if model is None else "" if model == models[0] else f"_{model.rsplit('/', 1)[-1]}"
        step = images_seen.get(model or "", 0)
        values |= {
            f"{key}{suffix}": (value, step)
            for key, value in (named | group_means(of_vtab) | corruption_metrics(named)).items()
        }
    if scores:
        values["time/trials_s"] = (sum(score.wall_s for score in scores), 0)
    return values


def by_init(scores: Sequence[Score]) -> list[list[Score]]:
    """The scores of each task and model, in their order: one for each seed, and for each number of shots."""
    groups: dict[tuple[str, str | None], dict[tuple[str, int], Score]] = {}
    for score in scores:  # a task that was named twice has its scores twice
        groups.setdefault((score.task, score.model), {})[score.protocol, score.seed] = score
    return [list(group.values()) for group in groups.values()]


def child_name(score: Score, models: Sequence[str]) -> str:
    """`digits`, `digits from scratch`, and `digits: emoji/2` for any model but the first."""
    if score.model is None:
        return f"{score.task} from scratch"
    return score.task if score.model == models[0] else f"{score.task}: {model_label(score.model)}"


def kept_models(root: Store, run_key: str, scores: Sequence[Score]) -> list[Model]:
    """The models that the final trials of scores have published, as far as they exist."""
    found = []
    for score in scores:
        if (uri := kept_model(root, score)) is not None and (record := model_record(uri)) is not None:
            tags = {
                "vitline.run_key": run_key,
                "vitline.trial": score.trials[-1],
                "vitline.protocol": score.protocol,
                "vitline.corpus_digest": score.corpus_digest,
            }
            made = record["provenance"]
            top1 = f"top-1 {percent(score.value)} of {score.num_examples:,} test images, seed {score.seed}"
            found.append(registered_model(uri, record["created_at"], made["steps"], made["images_seen"], top1, tags))
    return [model for model in found if model is not None]


def score_child(
    root: Store,
    scores: Sequence[Score],
    name: str,
    corpora: Mapping[str, DatasetUse],
    images_seen: Mapping[str, int],
    models: Sequence[Model] = (),
) -> Child:
    """The child run of one model on one task, with the models that its trials have published."""
    first, labels = scores[0], scores_by_name(scores)
    trials = {label: trial for label, score in labels.items() if (trial := final_result(root, score))}
    corpus, step = corpora.get(first.corpus_digest), images_seen.get(first.model or "", 0)
    values = {metric: (value, step) for metric, value in metrics_over_seeds(scores).items()}
    common = {
        "model": model_label(first.model) if first.model else "from scratch",
        "num_examples": first.num_examples,
        "num_classes": first.num_classes,
        "precision": first.precision,
        "majority_fraction": first.majority_fraction,
    }
    return Child(
        name=name,
        slug=f"{first.task}-{first.model_digest[:12] if first.model_digest else 'scratch'}",
        tags={
            "vitline.task": first.task,
            "vitline.protocol": ", ".join(dict.fromkeys(score.protocol for score in scores)),
            **({"vitline.model_uri": first.model, "vitline.model_digest": first.model_digest} if first.model else {}),
            "vitline.corpus_digest": first.corpus_digest,
            **{suffixed("vitline.trial", ".", label): trial.key for label, trial in trials.items()},
        },
        params=chosen_params(labels, common) | common,
        values=values | {"time/trials_s": (sum(score.wall_s for score in scores), 0)},
        curves=[
            (suffixed("train/loss", "_", label), loss, step)
            for label, trial in trials.items()
            for step, loss in trial.train_losses
        ],
        corpora=[corpus] if corpus else (),
        files={"scores.json": json_bytes([score.model_dump(mode="json") for score in scores])},
        stored_files={
            prefixed(label, "/", key.rpartition("/")[2]): f"trials/{key}"
            for label, score in labels.items()
            for key in (*score.files, *(trials[label].files if label in trials else ()))
            if not key.endswith(NOT_SENT)
        },
        models=models,
        facts=[
            *([f"**Weights:** `{first.model}`"] if first.model else []),
            *(
                f"**Predictions:** `{root.uri_of(f'trials/{trial.files[0]}')}`"
                for trial in trials.values()
                if trial.files
            ),
        ],
        table="\n\n".join(settings_table(label, score) for label, score in labels.items()),
    )


def chosen_params(labels: Mapping[str, Score], taken: Collection[str]) -> JSON:
    """The chosen settings by name, prefixed with `chosen.` if the name is taken: a probe's `num_examples` is that of its
    training split."""
    named = {prefixed(label, ".", k): plain(v) for label, score in labels.items() for k, v in score.chosen.items()}
    return {f"chosen.{name}" if name in taken else name: value for name, value in named.items()}


def scores_by_name(scores: Sequence[Score]) -> dict[str, Score]:
    """Scores of one task and model by a label that distinguishes them: `""` for a single one, `seed1`, `fewshot-10`, or both."""
    protocols, seeds = {score.protocol for score in scores}, {score.seed for score in scores}
    return {
        "-".join([score.protocol] * (len(protocols) > 1) + [f"seed{score.seed}"] * (len(seeds) > 1)): score
        for score in scores
    }


def settings_table(label: str, score: Score) -> str:
    """The score, and below it every setting that was tried, the chosen one in bold, as Markdown."""
    title = f"{f'{label}: ' * bool(label)}top-1 {percent(score.value)} of {score.num_examples:,} images"
    if score.calibration:
        title += f", expected calibration error {percent(score.calibration.ece)}"
    if score.by_severity:
        title += f", by severity {', '.join(percent(value) for _, value in sorted(score.by_severity.items()))}"
    if not score.tried:
        return title
    names = list(dict.fromkeys(name for tried in score.tried for name in tried))
    rows = [[_shown(name, tried.get(name, "")) for name in names] for tried in score.tried]
    rows = [
        [f"**{cell}**" for cell in row] if tried == score.chosen else row
        for row, tried in zip(rows, score.tried, strict=True)
    ]
    return f"{title}\n\n{markdown(names, rows)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        return percent(value) if name == "val_top1" else f"{value:.6g}"
    return str(plain(value))


def prefixed(label: str, sign: str, name: str) -> str:
    return f"{label}{sign}{name}" if label else name


def suffixed(name: str, sign: str, label: str) -> str:
    return f"{name}{sign}{label}" if label else name
