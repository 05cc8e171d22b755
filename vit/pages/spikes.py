"""What the spike guard leaves of a spike: the examples of its batch with the highest loss, with ids and pictures, as JSON and a page."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitline.infra.html.page import data_uri, render
from vitline.infra.html.pictures import image_file, thumbnail
from vitline.infra.html.text import shortened_list
from vitline.infra.storage import Store
from vitline.vit.config import TrainConfig
from vitline.vit.corpora.training_corpora import TrainingCorpora
from vitline.vit.corpora.training_sources import sources_of
from vitline.vit.input.batches import Batch, MultiLabels, order_of_training
from vitline.vit.input.decoded_cache import DecodedCache
from vitline.vit.input.read_shards import SplitReader
from vitline.vit.training.guard.spike_guard import Spike
from vitline.vit.training.world import World

FOLDER = "spikes"
MAX_SHOWN = 24
"""Examples on the page of a spike."""
_MAX_SIDE_PX, _MAX_NAMES = 160, 5


class Worst(NamedTuple):
    """An example of a batch."""

    loss: float
    rank: int
    number: int
    """Its place among the examples of the rank in this step."""
    labels: list[int]
    mixed_with: list[int]
    """Labels of the example that MixUp or CutMix mixed in; empty where there is none."""
    image: str
    """What the network saw of it, at most 160 x 160 px, as a data URI."""


def worst_examples(
    batches: Sequence[Batch], example_losses: Sequence[Tensor], world: World, most: int = MAX_SHOWN
) -> list[Worst]:
    """The examples of a step with the highest loss over all ranks, highest first. Every rank must call it, and gets the same."""
    losses = torch.cat(list(example_losses)).float().cpu()
    valid = torch.cat([batch.valid for batch in batches]).cpu()
    order = torch.argsort(torch.where(valid, losses, -torch.inf), descending=True, stable=True).tolist()
    mine = [(losses[i].item(), world.rank, i) for i in order[: min(most, int(valid.sum()))]]
    everyone = [tuple(each) for text in world.gather(json.dumps(mine)) for each in json.loads(text)]
    chosen = sorted(everyone, key=lambda each: (-each[0], each[1], each[2]))[:most]
    # Only the pictures that are shown travel between ranks.
    of_mine = [_seen(batches, i) for _, rank, i in chosen if rank == world.rank]
    seen = [json.loads(text) for text in world.gather(json.dumps(of_mine))]
    return [Worst(loss, rank, i, *seen[rank].pop(0)) for loss, rank, i in chosen]


def write_spike(
    run: Store,
    spike: Spike,
    config: TrainConfig,
    worst: Sequence[Worst],
    corpora: TrainingCorpora,
    *,
    world_size: int,
    title: str,
) -> None:
    """Writes `spikes/step-<9 digits>.json` and the page of the same name. Raises ShardError and errors of the store."""
    places, action = _places(spike["step"], config, worst, corpora, world_size), config.recipe.spike_guard.action
    names = corpora.class_names()
    examples = [
        {
            "example_id": place["example_id"],
            "corpus": place["corpus"],
            "row": place["row"],
            "loss": each.loss,
            "classes": [names[i] for i in each.labels],
            "mixed_with": [names[i] for i in each.mixed_with],
        }
        for each, place in zip(worst, places, strict=True)
    ]
    name = f"{FOLDER}/step-{spike['step']:09d}"
    run.write_json(
        f"{name}.json",
        {"schema_version": 1, "action": action, **spike, "split": config.split, "examples": examples},
    )
    page = render(
        "vit/pages/spike.html.j2",
        title=f"{title}, step {spike['step']:,}",
        text=spike_text(spike, action),
        cards=[
            (example, _shown(names, each.labels), _shown(names, each.mixed_with), each.image)
            for example, each in zip(examples, worst, strict=True)
        ],
        small=config.recipe.model.image_size_px < _MAX_SIDE_PX // 2,
        batch=config.recipe.input.global_batch_size,
    )
    run.write(f"{name}.html", page.encode())


def spike_text(spike: Spike, action: str) -> str:
    """A spike and what is done about it, as one sentence."""
    what = (
        f"step {spike['step']:,} is a spike: loss {spike['loss']:.4g} (limit {spike['loss_limit']:.4g}), gradient norm "
        f"{spike['grad_norm']:.4g} (limit {spike['grad_norm_limit']:.4g})"
    )
    if action == "rewind":
        return f"{what}; the training goes back and leaves out the updates of steps {spike['first']:,} to {spike['last']:,}"
    return f"{what}; its update is left out"


def _seen(batches: Sequence[Batch], index: int) -> tuple[list[int], list[int], str]:
    """Labels, labels of the partner, and picture of an example of this rank."""
    size = len(batches[0].valid)
    batch, i = batches[index // size], index % size
    image = data_uri(image_file(thumbnail(batch.images[i].cpu().numpy(), _MAX_SIDE_PX)))
    mixed = batch.mixed_labels is not None and batch.lam is not None and float(batch.lam[i]) < 1
    partner = _labels(batch.mixed_labels, i) if mixed and batch.mixed_labels is not None else []
    return _labels(batch.labels, i), partner, image


def _labels(labels: Tensor | MultiLabels, i: int) -> list[int]:
    if isinstance(labels, MultiLabels):
        found: list[int] = labels.ids[i][labels.weights[i] > 0].tolist()
        return found
    return [int(labels[i])]


def _places(
    step: int, config: TrainConfig, worst: Sequence[Worst], corpora: TrainingCorpora, world_size: int
) -> list[dict[str, object]]:
    """Corpus, row and id of the examples, by the reading order."""
    recipe, sources = config.recipe, sources_of(corpora, config.split)
    readers = [SplitReader(s.corpus, s.manifest, s.split, DecodedCache(0), s.labels) for s in sources]
    shares = {
        rank: next(
            order_of_training(
                sources,
                recipe.input,
                recipe.seed,
                rank=rank,
                world_size=world_size,
                most_examples=config.execution.planned_micro_batch,
            ).shares(step - 1, step)
        )
        for rank in sorted({each.rank for each in worst})
    }
    places = []
    for each in worst:
        share = shares[each.rank]
        source, row = int(share.source[each.number]), int(share.rows.row[each.number])
        manifest = sources[source].manifest
        places.append(
            {
                "corpus": f"{manifest.name}/{manifest.version}",
                "row": row,
                "example_id": readers[source].example_id(row),
            }
        )
    for reader in readers:
        reader.close()
    return places


def _shown(names: Sequence[str], ids: Sequence[int]) -> str:
    """Names of the first classes."""
    return shortened_list([names[i] for i in ids], _MAX_NAMES)
