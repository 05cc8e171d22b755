"""A form for a pre-training and its corpora -> the config, or a refusal in one sentence (ValueError). Starts nothing."""

from collections.abc import Sequence
from pathlib import Path

from data_prep.shard_format import Manifest, load_manifest
from flows.catalog import find_corpus
from flows.requests.forms import PipelineRequest, PretrainRequest
from flows.requests.training_draft import check_loss, draft_training, training_name
from infra.config import replace
from infra.storage import open_store
from vit.config import MixedCorpus, MixtureConfig, TrainConfig
from vit.corpora.mixture_classes import NAMES, PREFIXED
from vit.corpora.training_corpora import open_corpora


def resolve_pretrain(root: str, request: PretrainRequest) -> TrainConfig:
    """The config of a pre-training on a prepared corpus, or on a mixture of them."""
    check_mixture_fields(request)
    uris = [find_corpus(root, name).uri for name in (request.corpus, *(each.corpus for each in request.mix_with))]
    name = request.name or training_name(_together([load_manifest(open_store(uri)) for uri in uris]), request.recipe)
    return on_corpora(draft_training(name, request), request, uris)


def check_mixture_fields(request: PretrainRequest | PipelineRequest) -> None:
    """Refuses fields of a mixture without one."""
    if not request.mix_with and (request.corpus_weight != 1 or request.class_map != NAMES):
        field = "class_map" if request.class_map != NAMES else "corpus_weight"
        raise ValueError(
            f"{field}={getattr(request, field)!r} has an effect in a mixture only. Leave it out, or name further corpora in mix_with "
            "(`--corpus` once more)."
        )


def on_corpora(config: TrainConfig, request: PretrainRequest | PipelineRequest, uris: Sequence[str]) -> TrainConfig:
    """A draft with its prepared corpora: `corpus` of the form, then those of `mix_with`. Refuses a loss that does not suit the labels,
    and a mixture whose classes do not fit together."""
    manifests = [load_manifest(open_store(uri)) for uri in uris]
    for uri, manifest in zip(uris, manifests, strict=True):
        check_loss(config, uri, manifest)
    val = config.val_split if any(config.val_split in manifest.splits for manifest in manifests) else None
    config = replace(config, corpus=uris[0], mixture=_mixture(request, uris), val_split=val)
    if config.mixture is not None:
        open_corpora(config)  # raises for what does not fit together
    return config


def weights_of(request: PretrainRequest | PipelineRequest) -> list[float]:
    """The weights of the corpora of a form, in its order."""
    return [request.corpus_weight, *(each.weight for each in request.mix_with)]


def class_table_of(request: PretrainRequest | PipelineRequest) -> str | None:
    """The whole path or URI of the class table that a form names, since a job runs in another folder; None without a table."""
    if request.class_map in (NAMES, PREFIXED):
        return None
    return request.class_map if "://" in request.class_map else str(Path(request.class_map).expanduser().resolve())


def _mixture(request: PretrainRequest | PipelineRequest, uris: Sequence[str]) -> MixtureConfig | None:
    if not request.mix_with:
        return None
    corpora = (MixedCorpus(corpus=uri, weight=weight) for uri, weight in zip(uris, weights_of(request), strict=True))
    return MixtureConfig(corpora=tuple(corpora), class_map=class_table_of(request) or request.class_map)


def _together(manifests: Sequence[Manifest]) -> str:
    """`birds`, `birds-and-city`, or `birds-and-2-more`."""
    first, *others = (manifest.name for manifest in manifests)
    if not others:
        return first
    return f"{first}-and-{others[0] if len(others) == 1 else f'{len(others)}-more'}"
