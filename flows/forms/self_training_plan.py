"""A form for a student -> the plan of its stages, or a refusal in one sentence (ValueError). Starts nothing."""

from dataclasses import dataclass

from vitline.data_prep.config import CorpusConfig, CorpusRecipe, PredictedClasses
from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.shard_format import Manifest, load_class_names
from vitline.flows.forms.evaluation_plan import resolve_predict
from vitline.flows.forms.forms import FurtherCorpus, PredictRequest, PretrainRequest, SelfTrainRequest
from vitline.flows.forms.training_draft import check_loss, draft_training, training_name
from vitline.infra.storage import open_store
from vitline.vit.corpora.training_corpora import check_same_decoding
from vitline.vit.features.prediction_plan import PredictionSpec
from vitline.vit.published.model_record import published_record, read_classes

LONGEST_NAME, LONGEST_CORPUS_NAME = 40, 80
"""Characters that forms allow."""


@dataclass(frozen=True)
class SelfTrainingPlan:
    """The stages of a self-training: each has a run of its own, which the same form finds again."""

    prediction: PredictionSpec
    """The teacher's classes of the unlabelled images."""
    labelling: CorpusConfig
    """The corpus of these images with those labels; its version is known once the prediction is finished."""
    training: PretrainRequest
    """The student, still without that corpus."""
    predicted_weight: float

    def student_on(self, predicted: str) -> PretrainRequest:
        """The form of the student, which learns from the labelled corpus and the one at the URI `predicted`."""
        further = FurtherCorpus(corpus=predicted, weight=self.predicted_weight)
        return PretrainRequest.model_validate({**self.training.model_dump(), "mix_with": (further,)})


def resolve_self_train(root: str, request: SelfTrainRequest) -> SelfTrainingPlan:
    """The plan of a self-training whose teacher and corpora exist and fit together."""
    fields = {"model": request.teacher, "corpus": request.unlabelled, "splits": request.splits, "top_k": request.top_k}
    corpora = Corpora(open_store(root))
    prediction = resolve_predict(root, PredictRequest.model_validate(fields), corpora)
    labelled, manifest = corpora.named(request.corpus)
    unlabelled = corpora.at(prediction.corpus).manifest
    check_same_decoding(unlabelled, manifest)
    model = open_store(prediction.model)
    teacher = read_classes(model, published_record(model))
    names = load_class_names(labelled)
    if not set(teacher) & set(names):
        raise ValueError(
            f"The teacher {request.teacher} knows none of the classes of {manifest.name}, such as {names[0]!r}; "
            f"its first class is {teacher[0]!r}. Choose a teacher that was trained on the classes of the student."
        )
    training = PretrainRequest(
        corpus=labelled.uri,
        recipe=request.recipe,
        name=request.name or training_name(manifest.name, "student")[:LONGEST_NAME],
        seed=request.seed,
        train_images=request.train_images,
        num_workers=request.num_workers,
        overrides=request.overrides,
    )
    check_loss(draft_training(str(training.name), training), labelled.uri, manifest)
    return SelfTrainingPlan(prediction, _labelling(request, prediction, unlabelled), training, request.predicted_weight)


def _labelling(request: SelfTrainRequest, prediction: PredictionSpec, unlabelled: Manifest) -> CorpusConfig:
    source = PredictedClasses(
        path=f"{prediction.root}/runs/{prediction.run_key}",
        labels=request.labels,
        min_score=request.min_score,
        max_per_class=request.max_per_class,
    )
    # Copies among the images were kept or dropped when their corpus was prepared.
    recipe = CorpusRecipe(val_fraction=0, test_fraction=0, duplicates="keep", decode=unlabelled.decode_policy)
    return CorpusConfig(name=f"{unlabelled.name}-predicted"[:LONGEST_CORPUS_NAME], source=source, recipe=recipe)
