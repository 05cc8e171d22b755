"""The corpora on which checkpoints are probed during a training, by the names that a form gives (`execution.probes.corpora`)."""

from collections.abc import Collection

from vitline.flows.catalog.lists import find_corpus
from vitline.infra.config import replace
from vitline.vit.config import TrainConfig
from vitline.vit.features.checkpoint_plan import probed_corpora


def with_probed_corpora(config: TrainConfig, root: str) -> TrainConfig:
    """The config with the URIs of these corpora. Raises ValueError for one that is missing or cannot be probed on."""
    if not config.execution.probes.every_steps:
        return config
    uris = tuple(find_corpus(root, name).store.uri for name in config.execution.probes.corpora)
    found = replace(config, **{"execution.probes.corpora": uris})
    probed_corpora(found)
    return found


def check_probed_names(config: TrainConfig, root: str, planned: Collection[str]) -> None:
    """Refuses a name that is neither that of a prepared corpus nor of one that the pipeline prepares first."""
    for name in config.execution.probes.corpora:
        if name not in planned:
            find_corpus(root, name)
