"""A form for a fine-tuning -> its config and inputs, or a refusal in one sentence (ValueError). Starts nothing."""

from typing import Any

from vitline.data_prep.find_corpus import Corpora
from vitline.data_prep.shard_format import Manifest
from vitline.flows.catalog.lists import find_model
from vitline.flows.forms.forms import FinetuneRequest
from vitline.flows.forms.overrides import named_by
from vitline.flows.forms.probed_corpora import with_probed_corpora
from vitline.flows.forms.training_draft import check_loss, training_name, with_steps
from vitline.flows.forms.user_code import with_user_code
from vitline.infra.config import replace
from vitline.infra.storage import Store, open_store
from vitline.vit.config import ExecutionConfig, OptimConfig, TrainConfig, TrainRecipe, head_bias_for, loss_for
from vitline.vit.evaluation.evaluate import task_facts
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.evaluation.protocols import Protocol
from vitline.vit.evaluation.tasks import TaskSplits
from vitline.vit.input.config import AugmentConfig, InputConfig
from vitline.vit.input.image_contract import ImageContract
from vitline.vit.input.plan import propose_num_lanes
from vitline.vit.models.config import NetworkConfig, network_config
from vitline.vit.published.model_record import network_of, published_record, read_contract
from vitline.vit.run.resolved import ResolvedTraining, resolve


def resolve_finetune(root: str, request: FinetuneRequest) -> ResolvedTraining:
    """A fine-tuning by the paper's rules (arXiv:2010.11929, B.1.1); the loss is that of the labels of the corpus."""
    corpora, model = Corpora(open_store(root)), find_model(root, request.model)
    published = published_record(open_store(model))
    contract = ImageContract.model_validate(read_contract(open_store(model), published))
    architecture = network_of(open_store(model), published)
    store, manifest = corpora.named(request.corpus)
    overrides, named = dict(request.overrides), named_by("protocol", request.protocol, request.overrides)
    overrides.pop("protocol", None)
    if named is None:
        recipe = _finetune_recipe(request, architecture, contract.evaluation, manifest)
    else:
        recipe = _protocol_recipe(named, request, architecture, store, manifest)
    config = TrainConfig(
        name=training_name(manifest.name, "finetune"),
        stage="finetune",
        corpus=store.uri,
        val_split="val" if "val" in manifest.splits else None,
        init_model=model,
        recipe=recipe,
        execution=ExecutionConfig(save_every_steps=max(1, recipe.total_steps // 4)),
    )
    if request.num_workers is not None:  # with the overrides, which may make more lanes
        overrides = {"execution.num_workers": request.num_workers, **overrides}
    config = with_user_code(with_probed_corpora(replace(config, **overrides), corpora))
    check_loss(config, store.uri, manifest)
    return resolve(config, root, corpora.opened, {model: published})


def _finetune_recipe(
    request: FinetuneRequest, architecture: NetworkConfig, evaluation: AugmentConfig, manifest: Manifest
) -> TrainRecipe:
    """The recipe without a protocol: steps as requested, images as in the model's own evaluation."""
    size, batch, steps = request.image_size_px, request.global_batch_size or 512, request.steps or 500
    loss = loss_for(single_label=manifest.single_label)
    network = network_config(architecture.for_transfer(size, head_bias_for(loss, manifest.num_classes)))
    lanes = propose_num_lanes(
        manifest.split("train"),
        global_batch_size=batch,
        shuffle_window=4,
        mean_row_group_bytes=manifest.mean_row_group_bytes("train"),
    )
    augment = evaluation.for_transfer(network.image_size_px)
    return TrainRecipe(
        model=network,
        input=InputConfig(global_batch_size=batch, num_lanes=lanes, augment=augment),
        optim=OptimConfig(optimizer="sgd", peak_lr=request.peak_lr or 0.03, warmup_steps=min(500, steps // 5)),
        loss=loss,
        total_steps=steps,
        seed=request.seed,
    )


def _protocol_recipe(
    named: str, request: FinetuneRequest, architecture: NetworkConfig, store: Store, manifest: Manifest
) -> TrainRecipe:
    """The recipe of a protocol for a corpus of this size; fields of the request replace those of the protocol."""
    protocol = protocol_of(named)
    assert isinstance(protocol, Protocol)
    fields = ("image_size_px", "global_batch_size")
    given = {field: value for field in fields if (value := getattr(request, field)) is not None}
    whole = TaskSplits(train="train", val="val", joined="train")
    settings = replace(protocol, **given).settings(architecture, task_facts(store, manifest, whole), request.seed)
    chosen: dict[str, list[float]] = {
        "peak_lr": [each.optim.peak_lr for each in settings],
        "steps": [each.total_steps for each in settings],
    }
    for field, values in chosen.items():
        choices = [f"{value:,}" for value in dict.fromkeys(values)]
        if len(choices) > 1 and getattr(request, field) is None:
            raise ValueError(
                f"{protocol.name} chooses {field} among {', '.join(choices)}: set it to one of them, or try all of them with an "
                "evaluation (`vitline evaluate run`)."
            )
    changes: dict[str, Any] = {} if request.peak_lr is None else {"optim.peak_lr": request.peak_lr}
    if request.steps is not None:
        changes |= with_steps(settings[0], request.steps)
    return replace(settings[0], **changes)
