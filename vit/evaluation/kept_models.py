"""Publishes the network of a final trial, so that other test sets of the same classes can be scored with it (protocol `head`)."""

import torch

from vitline.data_prep.shard_format import Manifest, load_class_names
from vitline.infra.config import digest_of
from vitline.infra.runs.handle import Run
from vitline.infra.storage import open_store
from vitline.vit.evaluation.trials import Keep, Trial
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.models.network import Network
from vitline.vit.published.model_record import CONFIG, ModelProvenance
from vitline.vit.published.models import publish, read_model
from vitline.vit.training.world import World


def take_published(trial: Trial, network: Network, world: World) -> None:
    """Gives a trained network the weights that this trial has published before, in a process that was killed before it stored the
    result or in another evaluation, if there are any. On GPUs they may differ by rounding, and the result is that of what is published.
    Every rank must call it."""
    uri = open_store(_kept(trial).models).uri_of(trial.kept_name)
    if world.broadcast_int(open_store(uri).exists(CONFIG)):
        network.load_state_dict(read_model(uri).network.state_dict())


def keep_network(held: Run, trial: Trial, network: Network, manifest: Manifest) -> None:
    """Publishes the network of a final trial as `trial.kept_name`.

    Raises RuntimeError if another evaluation has published other weights since `take_published`.
    """
    name, version = trial.kept_name.split("/")
    contract = ImageContract(decode=manifest.decode_policy, evaluation=trial.recipe.input.augment)
    classes = load_class_names(open_store(trial.corpus))
    models = open_store(_kept(trial).models)
    uri = publish(models, name, version, network, contract, classes, provenance(trial), held.check)
    published = read_model(uri).network.state_dict()
    if not all(torch.equal(value.cpu(), published[key]) for key, value in network.state_dict().items()):
        raise RuntimeError(
            f"{uri} was published at the same time by another evaluation of this trial, with weights that differ by rounding. "
            "Run the same command again to score those."
        )


def _kept(trial: Trial) -> Keep:
    assert trial.keep is not None
    return trial.keep


def provenance(trial: Trial) -> ModelProvenance:
    """What the network of a trial was made from."""
    recipe, keep = trial.recipe, _kept(trial)
    made: ModelProvenance = {
        "trial": trial.key,
        "score": keep.score,
        "protocol": keep.protocol,
        "precision": recipe.precision,
        "config_digest": digest_of(recipe),
        "corpus_digest": trial.corpus_digest,
        "steps": recipe.total_steps,
        "images_seen": recipe.total_steps * recipe.input.global_batch_size,
    }
    if trial.model is not None:
        made |= {"init_model": trial.model, "init_model_digest": str(trial.model_digest)}
    return made
