"""Where the corpus of a request stands, found before any work: the same request finds what is finished."""

from data_prep.config import CorpusConfig
from data_prep.corpora.open_source import open_source
from data_prep.shard_format import MANIFEST_KEY, Manifest, load_manifest
from infra.config import digest_of
from infra.keys import run_key
from infra.storage import Store


def corpus_version(config: CorpusConfig) -> str:
    """12 hex digits that follow from the recipe and the state of the source: paths, sizes and times of a folder, the
    checksums of packages. Where the source lies and how the work is done are not in it.

    Raises ValueError where the source does not exist.
    """
    identity = {
        "source": config.source.model_dump(mode="json", exclude={"path", "cache"}),
        "recipe": config.recipe.model_dump(mode="json"),
    }
    inputs = {"source": open_source(config).fingerprint()}
    return run_key(config.name, "prepare", digest_of(identity), inputs).rpartition("-")[2]


def corpus_store(root: Store, config: CorpusConfig) -> Store:
    """The store of the corpus, finished or not."""
    return root.child(f"corpora/{config.name}/{corpus_version(config)}")


def find_corpus(root: Store, config: CorpusConfig) -> Manifest | None:
    """The manifest of the corpus if it is finished."""
    corpus = corpus_store(root, config)
    return load_manifest(corpus) if corpus.exists(MANIFEST_KEY) else None
