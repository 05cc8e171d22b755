"""The corpora on which checkpoints are probed during a training, by the names that a form gives (`execution.probes.corpora`)."""

from collections.abc import Collection

from vitline.data_prep.find_corpus import Corpora
from vitline.infra.config import replace
from vitline.vit.config import TrainConfig


def with_probed_corpora(config: TrainConfig, corpora: Corpora) -> TrainConfig:
    """The config with the URIs of these corpora. Raises ValueError for one that is missing."""
    if not config.execution.probes.every_steps:
        return config
    uris = tuple(corpora.named(name).store.uri for name in config.execution.probes.corpora)
    return replace(config, **{"execution.probes.corpora": uris})


def check_probed_names(config: TrainConfig, corpora: Corpora, planned: Collection[str]) -> None:
    """Refuses a name that is neither that of a prepared corpus nor of one that the pipeline prepares first."""
    for name in config.execution.probes.corpora:
        if name not in planned:
            corpora.named(name)
