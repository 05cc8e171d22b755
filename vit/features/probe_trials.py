"""Plans the probe trials of an evaluation: method, features and splits of each score. Imports no torch, so flows can plan.

`score_probes.py` computes the scores.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from vitline.data_prep.shard_format import Manifest, load_class_names, load_manifest
from vitline.infra.config import FrozenConfig, digest_of, replace
from vitline.infra.keys import RESULT_VERSIONS
from vitline.infra.storage import Store, open_store
from vitline.vit.evaluation.evaluate import EvaluationSpec, TaskRef, again, published_digest
from vitline.vit.evaluation.probes import Method, Probe
from vitline.vit.evaluation.tasks import find_task_splits
from vitline.vit.features.feature_plan import FeaturePart, FeatureSource, plan_parts
from vitline.vit.published.model_record import published_record, read_classes


class ProbeSplits(FrozenConfig):
    """The splits of a probe: choose a strength on `train` and `val`, fit on `joined`, score `test` once."""

    train: str = ""
    val: str = ""
    joined: tuple[str, ...] = ()
    """The split that joins `train` and `val`, or both where a corpus has no such split."""
    test: str = "test"


class ProbeTrial(FrozenConfig):
    """One probe on the features of one model, on one task with one seed."""

    task: TaskRef
    protocol: str
    """Name of the protocol, with the number of shots if it has one."""
    method: Method
    shots: int | None
    seed: int
    source: FeatureSource
    splits: ProbeSplits
    head_classes: tuple[int, ...] = ()
    """Of the method `head`: the class of the model that each class of the corpus is; empty if they are the same in the same order."""
    num_classes: int
    num_test: int
    """Number of images of the test split; all of them must be counted."""
    test_digest: str
    """Digest of the test split."""

    @property
    def corpus_digest(self) -> str:
        return self.source.corpus_digest

    @property
    def score_key(self) -> str:
        """`scores/<task>/<protocol>/<model>-s<seed>-<6 hex>.json`. The hex covers everything else that the score depends on."""
        first = replace(self.source, repetition=0).folder
        depends_on = [self.method, self.shots, self.splits, first, RESULT_VERSIONS["evaluate"]]
        name = (
            f"{self.source.model_digest[:12]}-s{self.seed}-{digest_of(depends_on)[:6]}{again(self.source.repetition)}"
        )
        return f"scores/{self.task.name}/{self.protocol}/{name}.json"

    @property
    def key(self) -> str:
        """Names it among the trials of its evaluation, also in the name of a file."""
        return self.score_key.removeprefix("scores/").removesuffix(".json").replace("/", "-")

    @property
    def needed(self) -> tuple[str, ...]:
        """The splits whose features are needed."""
        chosen_on = (self.splits.train, self.splits.val) if self.method == "logistic" else ()
        return tuple(dict.fromkeys((*chosen_on, *self.splits.joined, self.splits.test)))


def plan_probe_trials(spec: EvaluationSpec, to_come: Mapping[str, str] | None = None) -> list[ProbeTrial]:
    """The probe trials of an evaluation, task by task. Probes without random draws use the first seed only. `to_come` are models that
    are not published yet, with digests that stand for theirs: their classes are not checked.

    Raises ValueError for the control, for an unknown model, for a corpus without the needed splits or with several labels
    per image, and for a head that lacks a class of the corpus.
    """
    probe = spec.protocol
    assert isinstance(probe, Probe)
    planned = to_come or {}
    digests = [_digest_of_model(model, probe, planned) for model in spec.models]
    probe_trials = []
    for task in spec.tasks:
        corpus = open_store(task.corpus)
        manifest = load_manifest(corpus)
        splits = probe_splits(manifest, task.corpus, probe)
        for model, digest in digests:
            head = head_classes(model, corpus) if probe.method == "head" and model not in planned else ()
            source = FeatureSource(
                model=model,
                model_digest=digest,
                corpus=corpus.uri,
                corpus_digest=manifest.digest,
                decode_digest=digest_of(manifest.decode_policy),
                repetition=spec.repetition,
            )
            probe_trials += [
                ProbeTrial(
                    task=task,
                    protocol=probe.name if shots is None else f"{probe.name}-{shots}",
                    method=probe.method,
                    shots=shots,
                    seed=seed,
                    source=source,
                    splits=splits,
                    head_classes=head,
                    num_classes=manifest.num_classes,
                    num_test=manifest.split(splits.test).num_rows,
                    test_digest=manifest.split(splits.test).digest,
                )
                for seed in (spec.seeds if probe.shots else spec.seeds[:1])
                for shots in probe.shots or (None,)
            ]
    return probe_trials


def _digest_of_model(model: str | None, probe: Probe, planned: Mapping[str, str]) -> tuple[str, str]:
    digest = planned.get(model or "") or published_digest(model)
    if model is None or digest is None:
        raise ValueError(
            f"Protocol {probe.name!r} scores features of a published model, so it has no control from scratch. Leave the "
            "control out, or use a fine-tuning protocol."
        )
    return model, digest


def probe_splits(manifest: Manifest, where: str, probe: Probe) -> ProbeSplits:
    """The splits of a corpus for a probe, preferably those of the 1k protocols. Raises ValueError naming missing splits."""
    if probe.method == "head":
        return ProbeSplits(test=_named_split("test", manifest.splits, where))
    if not manifest.single_label:
        raise ValueError(
            f"{where} may have several labels per image, but protocol {probe.name!r} needs one. Use protocol 'head' with a "
            "model that has the classes of the corpus."
        )
    names = set(manifest.splits)
    try:
        found = find_task_splits(names, where)
    except ValueError:
        # Fine-tuning needs train and val as one split, but a probe can read the features of both.
        if not {"train", "val", "test"} <= names:
            raise
        return ProbeSplits(train="train", val="val", joined=("train", "val"))
    return ProbeSplits(train=found.train, val=found.val, joined=(found.joined,), test=found.test)


def _named_split(name: str, names: Iterable[str], where: str) -> str:
    if name not in names:
        raise ValueError(
            f"{where} has splits {', '.join(sorted(names))}, but protocol 'head' needs split {name!r}. Choose another corpus."
        )
    return name


def head_classes(model: str, corpus: Store) -> tuple[int, ...]:
    """The class of the model that each class of a corpus is, by its name; empty if both have the same classes in the same order.

    Raises ValueError for a class that the model does not have, and for two classes of one name.
    """
    store = open_store(model)
    ours, theirs = read_classes(store, published_record(store)), load_class_names(corpus)
    if ours == theirs:
        return ()
    in_head, in_corpus = Counter(ours), Counter(theirs)
    if odd := next((name for name in theirs if (in_head[name], in_corpus[name]) != (1, 1)), None):
        raise ValueError(
            f"{model} cannot be scored on {corpus.uri} with its own head: {in_head[odd]} of its classes and {in_corpus[odd]} of the corpus "
            f"are named {odd!r}, expected one each. Every class of the corpus must be a class of the head, by its name. For other classes "
            "use protocol 'linear' or 'fewshot', which fit a new head."
        )
    places = {name: place for place, name in enumerate(ours)}
    return tuple(places[name] for name in theirs)


def feature_splits(probe_trials: Iterable[ProbeTrial]) -> list[tuple[Manifest, list[FeaturePart]]]:
    """Each split whose features a probe trial needs, once: the manifest of its corpus, and its parts."""
    wanted = {(r.source.folder, split): r.source for r in probe_trials for split in r.needed}
    manifests = {source.corpus: load_manifest(open_store(source.corpus)) for source in wanted.values()}
    return [
        (manifests[source.corpus], plan_parts(source, manifests[source.corpus], split))
        for (_, split), source in wanted.items()
    ]
