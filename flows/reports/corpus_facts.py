"""What a corpus is compared by: manifest, class map, statistics."""

from vitline.data_prep.labels.classes import ClassMap
from vitline.data_prep.pages.diff_stats import CorpusFacts
from vitline.data_prep.shard_format import CLASSES_KEY, load_manifest
from vitline.flows.catalog.lists import corpus_stats
from vitline.infra.storage import Store


def facts_of(corpus: Store) -> tuple[CorpusFacts, str]:
    """The facts by which a corpus is compared, and the corpus that its statistics describe: another one for a subset. Raises
    RuntimeError if there are no statistics."""
    found, manifest = corpus_stats(corpus), load_manifest(corpus)
    class_map = ClassMap.from_file(corpus.read_json(CLASSES_KEY))
    return CorpusFacts(manifest, class_map, found.stats), found.of
