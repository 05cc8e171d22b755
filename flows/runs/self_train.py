"""Self-training (noisy student, Xie et al., CVPR 2020): predicted classes -> a corpus with these labels -> a student."""

from collections.abc import Callable
from typing import TypeVar

from vitline.data_prep.shard_format import load_manifest
from vitline.flows.forms.self_training_plan import SelfTrainingPlan
from vitline.flows.forms.training_config import resolve_pretrain
from vitline.flows.runs.predict_classes import predict_classes, prediction_sentence
from vitline.flows.runs.prepare_corpus import PreparedCorpus, prepare_corpora
from vitline.flows.runs.services import Services
from vitline.infra.html.text import percent
from vitline.infra.storage import open_store
from vitline.vit.run.resolved import ResolvedTraining

T = TypeVar("T")


def self_train(plan: SelfTrainingPlan, services: Services, train: Callable[[ResolvedTraining], T]) -> T:
    """Labels images with the teacher and returns what `train` makes of the student. Raises as `label_images` and `train`."""
    services.observer.outline(f"Stages of {plan.labelling.name}", ("predict", "prepare-corpus", "pretrain"), {})
    student = resolve_pretrain(services.root, plan.student_on(label_images(plan, services).uri))
    return services.observer.part(
        "pretrain", student.config.name, {"name": student.config.name}, lambda: train(student)
    )


def label_images(plan: SelfTrainingPlan, services: Services) -> PreparedCorpus:
    """The corpus of the images that the teacher is sure of. What is finished is reused. Raises Skipped, StageFailed, and ValueError
    where no image is left."""
    unlabelled = load_manifest(open_store(plan.prediction.corpus))
    predicted = services.observer.part(
        "predict",
        plan.prediction.run_key,
        {"model": plan.prediction.model, "corpus": plan.prediction.corpus},
        lambda: predict_classes(plan.prediction, services),
    )
    services.observer.say(prediction_sentence(plan.prediction, predicted))
    (corpus,), _, _ = services.observer.part(
        "prepare-corpus",
        plan.labelling.name,
        {"name": plan.labelling.name, "source": plan.labelling.source.model_dump(mode="json")},
        lambda: prepare_corpora([plan.labelling], services),
    )
    kept, of = corpus.manifest.counts.num_accepted, predicted.state["predicted"]["images"]
    services.observer.say(
        f"{kept:,} of {of:,} images of {unlabelled.name} ({percent(kept / of)}) have a label of the teacher: {corpus.uri}"
    )
    return corpus
