"""Scores models on tasks by fine-tuning: choose a setting on validation, train once more on all examples, score test once.

Only the chosen setting is scored on test. Where a protocol has one setting, there is nothing to choose, and it is trained once. A second
request returns the stored record.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from vitline.data_prep.shard_format import Manifest, ShardReader, load_manifest
from vitline.infra.config import FrozenConfig, digest_of, omitted_at_default
from vitline.infra.keys import RESULT_VERSIONS
from vitline.infra.records import StoredRecord
from vitline.infra.storage import Store, open_store
from vitline.vit.config import Precision, TrainRecipe
from vitline.vit.evaluation.calibration import Calibration
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol, TaskFacts
from vitline.vit.evaluation.tasks import TaskSplits, benchmark_name, find_task_splits, metric_group
from vitline.vit.evaluation.trials import Keep, Trial, TrialResult, finished_result, kept_name, model_label
from vitline.vit.models.config import AnyNetworkConfig
from vitline.vit.published.model_record import CONFIG, published_record

STOP_GRACE_S = 10.0
"""Seconds from a stop request to the end of the job of an evaluation; what its trials save must fit into them."""


class TaskRef(FrozenConfig):
    """A task to score: a corpus that has the splits which the protocol needs."""

    name: str
    """Name of the corpus."""
    corpus: str
    """URI of the prepared corpus."""


class EvaluationSpec(FrozenConfig):
    """`config.json` of an evaluation: every (task, model) pair under one protocol, once per seed."""

    schema_version: int = 1
    run_key: str
    tasks: tuple[TaskRef, ...]
    models: tuple[str | None, ...]
    """URIs of published models. None is the control, which trains from scratch with the same steps and settings."""
    architecture: AnyNetworkConfig
    """Network of the models, and of the control."""
    protocol: Protocol | Probe
    seed: int = 0
    """The first seed."""
    num_seeds: PositiveInt = 1
    """Number of consecutive seeds, from `seed` on."""
    repetition: NonNegativeInt = 0
    """0 for the first scoring; to replace records, one more than their repetition."""
    keep_models: bool = False
    """Whether final trials publish their networks. No score depends on it."""
    root: str
    """Root URI, below which trials and scores are stored."""

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_seeds)


class Score(StoredRecord):
    """One score record: a model, or the control, on one task under one protocol with one seed."""

    schema_version: int = 1
    task: str
    protocol: str
    seed: int
    model: str | None
    model_digest: str | None
    """None: trained from scratch."""
    metric: str = "top1"
    value: float
    """Fraction of the test split, 0 to 1."""
    num_examples: int
    calibration: Calibration | None = None
    """None of records before there was one, and of predictions without probabilities (few-shot least squares)."""
    by_severity: dict[int, float] = omitted_at_default({})
    """Of a corruption of ImageNet-C, scored by `head`: the score of each severity, 1 to 5."""
    precision: Precision = "float32"
    """Of matrix products in training and scoring."""
    chosen: dict[str, Any]
    """The chosen setting with its validation score."""
    tried: tuple[dict[str, Any], ...]
    """Every setting with its validation score, if there was one to choose; of one that has failed, with the reason as `failed`."""
    majority_fraction: float
    """Share of the majority class of the test split: the score of always predicting it."""
    num_classes: int
    corpus_digest: str
    split_digest: str = ""
    """Digest of the test split."""
    wall_s: float
    cpu_s: float
    trials: tuple[str, ...]
    """Keys of the trials; empty for probes."""
    files: tuple[str, ...] = ()
    """Keys, below `trials`, of the figures of a probe; those of a final trial are in its result."""
    repetition: int = 0
    replaces: str | None = None
    """Key of the record that this one replaces, if it is a repetition."""

    @property
    def metric_name(self) -> str:
        return metric_name(self.protocol, self.task)

    @property
    def ece_name(self) -> str:
        """The metric of the expected calibration error: `tasks/<corpus>/ece` beside `tasks/<corpus>/top1`."""
        return f"{self.metric_name.removesuffix('top1')}ece"

    @property
    def metrics(self) -> dict[str, float]:
        """The score, and as far as there are any the expected calibration error and the scores of severities, by their names."""
        ece = {} if self.calibration is None else {self.ece_name: self.calibration.ece}
        of_severities = {severity_metric(self.metric_name, number): value for number, value in self.by_severity.items()}
        return {self.metric_name: self.value} | ece | of_severities


def metric_name(protocol: str, task: str) -> str:
    """`vtab/<task>/top1` for VTAB's tasks, else `tasks/<corpus>/top1`; of a task, by the name of its corpus, under a protocol.

    Probes have `fewshot/<corpus>/10shot/top1`, `linear/<corpus>/top1` and so on. They use the name of the corpus,
    because `cifar100` and `vtab-cifar100` are different tasks.
    """
    method, _, shots = protocol.partition("-")
    if method == "fewshot":
        return f"fewshot/{task}/{shots}shot/top1"
    if method in ("linear", "knn", "head"):
        return f"{method}/{task}/top1"
    return f"{metric_group(task)}/{benchmark_name(task)}/top1"


def severity_metric(name: str, severity: int) -> str:
    """`head/imagenet-c-fog/severity_3/top1`, of `head/imagenet-c-fog/top1`."""
    return f"{name.removesuffix('top1')}severity_{severity}/top1"


class AllSettingsFailed(RuntimeError):
    """Every setting of a task sweep has failed, so there is none to score; the message names task, settings and reasons."""


class TaskSweep(FrozenConfig):
    """All trials of one model on one task with one seed."""

    task: TaskRef
    corpus_digest: str
    decode_digest: str
    num_classes: int
    splits: TaskSplits
    model: str | None
    model_digest: str | None
    protocol: Protocol
    seed: int
    settings: tuple[TrainRecipe, ...]
    test_digest: str
    """Digest of the test split."""
    repetition: int = 0
    keep_in: str | None = None
    """URI of the folder of models in which the final trial publishes its network; None keeps none."""

    @property
    def num_trials(self) -> int:
        """Those of a sweep in which no setting fails."""
        return len(self.select_trials()) + 1

    def select_trials(self) -> list[Trial]:
        """One for every setting; none where there is one setting only."""
        return [self._trial("select", recipe) for recipe in self.settings] if len(self.settings) > 1 else []

    def final_trial(self, selected: Sequence[TrialResult], failed: Sequence[TrialResult] = ()) -> Trial:
        """The trial with the setting that is best on validation (the first of equal ones), on all training examples.

        Settings that have failed are left out; `failed` are the final trials that have. Raises AllSettingsFailed.
        """
        failures = self._failures(selected, failed)
        left = [i for i, failure in enumerate(failures) if failure is None]
        if not left:
            raise AllSettingsFailed(self._no_setting_left(failures))
        best = max(left, key=lambda i: (selected[i].top1, -i)) if selected else left[0]
        return self._trial("final", self.settings[best])

    def score(
        self, selected: Sequence[TrialResult], final: TrialResult, trial: Trial, failed: Sequence[TrialResult] = ()
    ) -> Score:
        tried = tuple(
            {"peak_lr": recipe.optim.peak_lr, "total_steps": recipe.total_steps}
            | ({"val_top1": result.top1} if result else {})
            | ({"failed": failure} if failure else {})
            for recipe, result, failure in zip(
                self.settings, _of_settings(selected), self._failures(selected, failed), strict=True
            )
        )
        results = (*selected, *failed, final)
        return Score(
            task=self.task.name,
            protocol=self.protocol.name,
            seed=self.seed,
            model=self.model,
            model_digest=self.model_digest,
            value=final.top1,
            num_examples=final.num_examples,
            calibration=final.calibration,
            precision=trial.recipe.precision,
            majority_fraction=final.majority_fraction,
            chosen=tried[self.settings.index(trial.recipe)],
            tried=tried,
            num_classes=self.num_classes,
            corpus_digest=self.corpus_digest,
            split_digest=self.test_digest,
            repetition=self.repetition,
            replaces=replaced(self.score_key),
            wall_s=sum(r.wall_s for r in results),
            cpu_s=sum(r.cpu_s for r in results),
            trials=tuple(r.key for r in results),
        )

    @property
    def score_key(self) -> str:
        """`scores/<task>/<protocol>/<model>-s<seed>-<6 hex>.json`. The hex covers everything else that the score depends on."""
        model = self.model_digest[:12] if self.model_digest else f"scratch-{digest_of(self.settings[0].model)[:12]}"
        versions = [RESULT_VERSIONS[stage] for stage in ("finetune", "evaluate")]
        depends_on = [self.protocol, self.corpus_digest, self.decode_digest, self.settings[0].model, versions]
        # Scores of tasks with several labels that were trained with softmax are not taken for these.
        if (loss := self.settings[0].loss) != "softmax":
            depends_on.append(loss)
        identity = digest_of(depends_on)[:6]
        return (
            f"scores/{self.task.name}/{self.protocol.name}/{model}-s{self.seed}-{identity}{again(self.repetition)}.json"
        )

    def _failures(self, selected: Sequence[TrialResult], failed: Sequence[TrialResult]) -> list[str | None]:
        """Why each setting has failed, or None."""
        of_finals = {result.key: result.failure for result in failed}
        return [
            (result and result.failure) or of_finals.get(self._trial("final", recipe).key)
            for recipe, result in zip(self.settings, _of_settings(selected), strict=True)
        ]

    def _no_setting_left(self, failures: Sequence[str | None]) -> str:
        of = f"model {model_label(self.model)}" if self.model else "the network trained from scratch"
        settings = "; ".join(
            f"peak_lr {recipe.optim.peak_lr:g} with {recipe.total_steps:,} steps: {failure}"
            for recipe, failure in zip(self.settings, failures, strict=True)
        )
        return (
            f"{self.task.name} has no score for {of} with seed {self.seed}, because every setting of {self.protocol.name} "
            f"failed: {settings}. Evaluate with a protocol of smaller learning rates"
        )

    def _trial(self, phase: Any, recipe: TrainRecipe) -> Trial:
        splits = self.splits
        train_split, score_split = (splits.train, splits.val) if phase == "select" else (splits.joined, splits.test)
        kept = phase == "final" and self.keep_in is not None
        return Trial(
            task=self.task.name,
            corpus=self.task.corpus,
            corpus_digest=self.corpus_digest,
            decode_digest=self.decode_digest,
            model=self.model,
            model_digest=self.model_digest,
            phase=phase,
            train_split=train_split,
            score_split=score_split,
            recipe=recipe,
            repetition=self.repetition,
            keep=Keep(models=self.keep_in, score=self.score_key, protocol=self.protocol.name) if kept else None,
        )


def _of_settings(selected: Sequence[TrialResult]) -> Sequence[TrialResult | None]:
    """The result of each setting on validation; None of the only one, which is not scored there."""
    return selected or (None,)


def again(repetition: int) -> str:
    """Suffix of a record's name: `-r2` for repetition 2, empty for the first scoring."""
    return f"-r{repetition}" if repetition else ""


def replaced(score_key: str) -> str | None:
    """Key of the record that the repetition at `score_key` replaces; None for a first scoring."""
    match = re.fullmatch(r"(.+)-r(\d+)\.json", score_key)
    return f"{match[1]}{again(int(match[2]) - 1)}.json" if match else None


def plan_task_sweeps(spec: EvaluationSpec) -> list[TaskSweep]:
    """The task sweeps of an evaluation. Raises ValueError for a corpus without the splits of a task or an unknown model."""
    assert isinstance(spec.protocol, Protocol)
    digests = [published_digest(model) for model in spec.models]
    keep_in = open_store(spec.root).uri_of("models") if spec.keep_models else None
    task_sweeps = []
    for task in spec.tasks:
        corpus = open_store(task.corpus)
        manifest = load_manifest(corpus)
        splits = find_task_splits(manifest.splits, task.corpus, spec.protocol.splits)
        facts = task_facts(corpus, manifest, splits)
        for model, digest in zip(spec.models, digests, strict=True):
            task_sweeps += [
                TaskSweep(
                    task=task,
                    corpus_digest=manifest.digest,
                    decode_digest=digest_of(manifest.decode_policy),
                    num_classes=manifest.num_classes,
                    splits=splits,
                    model=model,
                    model_digest=digest,
                    protocol=spec.protocol,
                    seed=seed,
                    settings=spec.protocol.settings(spec.architecture, facts, seed),
                    test_digest=manifest.split(splits.test).digest,
                    repetition=spec.repetition,
                    keep_in=keep_in,
                )
                for seed in spec.seeds
            ]
    return task_sweeps


def task_facts(corpus: Store, manifest: Manifest, splits: TaskSplits) -> TaskFacts:
    """The properties of a task that protocols may use. Reads the image sizes of one row group."""
    with ShardReader(corpus, manifest, splits.joined) as reader:
        sizes = reader.row_group(0, ["width_px", "height_px"]).to_pydict()
    return TaskFacts(
        name=manifest.name,
        num_train=manifest.split(splits.joined).num_rows,
        max_lanes=min(manifest.split(name).num_row_groups for name in (splits.train, splits.joined)),
        mean_area_px=fmean(w * h for w, h in zip(sizes["width_px"], sizes["height_px"], strict=True)),
        num_classes=manifest.num_classes,
        single_label=manifest.single_label,
    )


def published_digest(model: str | None) -> str | None:
    """Digest of the published model at a URI; None for the control. Raises ValueError if there is no model."""
    if model is None:
        return None
    try:
        digest: str = published_record(open_store(model))["digest"]
    except (FileNotFoundError, KeyError) as error:
        raise ValueError(
            f"{model} is not a published model ({error}). `vitline model ls` lists the published models."
        ) from error
    return digest


def next_trials(task_sweep: TaskSweep, trials: Store) -> tuple[list[Trial], Score | None]:
    """The trials of a task sweep that can run now and are not in the store; once there are none left, the score.

    Where a final trial has failed, the next best setting is trained. Raises AllSettingsFailed if every setting has failed.
    """
    select = task_sweep.select_trials()
    results = [finished_result(trials, trial) for trial in select]
    if todo := [trial for trial, result in zip(select, results, strict=True) if result is None]:
        return todo, None
    done = [result for result in results if result is not None]
    final, result, failed = final_outcome(task_sweep, done, trials)
    return ([final], None) if result is None else ([], task_sweep.score(done, result, final, failed))


def final_outcome(
    task_sweep: TaskSweep, selected: Sequence[TrialResult], trials: Store
) -> tuple[Trial, TrialResult | None, list[TrialResult]]:
    """The final trial, its result if it has ended, and the final trials of better settings, which have failed.

    Raises AllSettingsFailed.
    """
    failed: list[TrialResult] = []
    while True:
        final = task_sweep.final_trial(selected, failed)
        result = finished_result(trials, final)
        if result is None or result.failure is None:
            return final, result, failed
        failed.append(result)


def final_result(root: Store, score: Score) -> TrialResult | None:
    """The result of the final trial of a score; None for a probe, or if the result was deleted."""
    return TrialResult.load_or_none(root, f"trials/{score.trials[-1]}.json") if score.trials else None


def kept_model(root: Store, score: Score) -> str | None:
    """URI of the model that the final trial of a score has published; None if it has not, or if the model was deleted."""
    if not score.trials:
        return None
    folder = f"models/{kept_name(score.model, score.task, score.trials[-1])}"
    return root.uri_of(folder) if root.exists(f"{folder}/{CONFIG}") else None


def without_weights(root: Store, task_sweeps: Iterable[TaskSweep]) -> list[TaskSweep]:
    """Those that keep their networks and have a score, recorded or still to be recorded, without one."""
    scores = ((task_sweep, ended_score(root, task_sweep)) for task_sweep in task_sweeps if task_sweep.keep_in)
    return [task_sweep for task_sweep, score in scores if score is not None and kept_model(root, score) is None]


def ended_score(root: Store, task_sweep: TaskSweep) -> Score | None:
    """The score of a task sweep whose trials have ended; None while one is missing, and where every setting has failed."""
    if (recorded := Score.load_or_none(root, task_sweep.score_key)) is not None:
        return recorded
    with contextlib.suppress(AllSettingsFailed):
        return next_trials(task_sweep, root.child("trials"))[1]
    return None


def total_trials(task_sweeps: Iterable[TaskSweep]) -> int:
    return sum(task_sweep.num_trials for task_sweep in task_sweeps)


def init_text(model: str | None) -> str:
    """What a trial starts from; `model` is a URI or digest, None for the control."""
    return "pre-trained" if model else "from scratch"
