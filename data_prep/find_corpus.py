"""Locates the corpus of a request before any work is done: the same request finds the corpus that is already finished."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vitline.data_prep.config import CorpusConfig, LabelTable, Source
from vitline.data_prep.labels.class_maps import load_class_map
from vitline.data_prep.shard_format import MANIFEST_KEY, Manifest, load_manifest
from vitline.data_prep.sources.open_source import open_source
from vitline.infra.config import digest_of
from vitline.infra.keys import run_key
from vitline.infra.names import known_names_text
from vitline.infra.records import UnreadableRecord, and_unreadable, readable
from vitline.infra.storage import Store, is_location, open_store


class FoundCorpus(NamedTuple):
    """A finished corpus with its manifest, read once."""

    store: Store
    manifest: Manifest


def corpus_version(root: Store, config: CorpusConfig) -> str:
    """12 hex digits computed from the recipe, the state of the source (paths, sizes and times of a folder, the checksums of
    packages) and the corpora that the request names. The location of the source and `execution` are not included.

    Raises ValueError if the source or a named corpus does not exist.
    """
    identity = {"source": _identity_of(config.source), "recipe": config.recipe.model_dump(mode="json")}
    inputs = {"source": open_source(config).fingerprint()}
    if config.recipe.class_map:
        inputs["class_map"] = load_class_map(config.recipe.class_map).digest
    named = [*config.recipe.decontaminate, *([config.add_to] if config.add_to else [])]
    inputs |= {name: prepared_corpus(root, name).manifest.digest for name in named}
    return run_key(config.name, "prepare", digest_of(identity), inputs).rpartition("-")[2]


def _identity_of(source: Source) -> dict[str, Any]:
    """What the version of a corpus covers of its source config: not where things are. `top_folders` and `allowed_roots` are left
    out while they have their default."""
    identity = source.model_dump(mode="json", exclude={"path", "cache"})
    if identity.get("top_folders") == "auto":
        del identity["top_folders"]
    if not isinstance(source, LabelTable) or not source.allowed_roots:
        identity.pop("allowed_roots", None)  # the fingerprint of other sources covers which links are refused
    return identity


def corpus_store(root: Store, config: CorpusConfig) -> Store:
    """The store of the corpus, whether finished or not."""
    return root.child(f"corpora/{config.name}/{corpus_version(root, config)}")


class Corpora:
    """The finished corpora below a root. What was listed or read is kept, so that a request asks for each of them once; `known` were
    read before."""

    def __init__(self, root: Store, known: Iterable[FoundCorpus] = ()) -> None:
        self._root = root
        self._keys = dict[str, list[str]]()
        self._opened = {corpus.store.uri: corpus for corpus in known}

    @property
    def opened(self) -> Mapping[str, FoundCorpus]:
        """Those that are known or were read so far, by URI."""
        return self._opened

    def at(self, uri: str) -> FoundCorpus:
        """The corpus at a URI, also outside of the root. Raises ValueError for one that is missing or cannot be read."""
        try:
            return self._open(open_store(uri))
        except UnreadableRecord as error:
            raise ValueError(str(error)) from error

    def named(self, name: str) -> FoundCorpus:
        """The corpus of a path or URI, or of a name as `find` takes it. Raises ValueError."""
        return self.at(name) if is_location(name) else self.find(name)

    def find(self, name: str) -> FoundCorpus:
        """The finished corpus NAME (its newest version that is not a subset) or NAME/VERSION. Raises ValueError that lists the
        existing corpora."""
        odd = list[UnreadableRecord]()
        # All corpora are read only to find one that was copied to a folder of another name, and for the error.
        is_folder = all(part.strip(".") for part in name.split("/"))
        for folder in dict.fromkeys((name, name.partition("/")[0], "")) if is_folder else ("",):
            odd.clear()
            every = self.all(odd.append, folder)
            for found in reversed(every):
                manifest = found.manifest
                of_that_name = name == manifest.name and manifest.view_of is None
                if of_that_name or name == f"{manifest.name}/{manifest.version}":
                    return found
        known = known_names_text(name, {manifest.name for _, manifest in every})
        below = self._root.uri.removeprefix("file://")
        raise ValueError(
            f"There is no corpus {name!r} below {below}; {known} `vitline data prepare` prepares one.{and_unreadable(odd)}"
        )

    def all(self, report: Callable[[UnreadableRecord], None], folder: str = "") -> list[FoundCorpus]:
        """Every finished corpus, or those in the folder of a NAME or NAME/VERSION, sorted by name, then from old to new. One that
        cannot be read is reported."""
        found = readable(
            self._listed(folder), lambda key: self._open(self._root.child(key.removesuffix(f"/{MANIFEST_KEY}"))), report
        )
        return sorted(found, key=lambda each: (each.manifest.name, str(each.manifest.provenance.get("created_at", ""))))

    def _listed(self, folder: str) -> list[str]:
        if folder not in self._keys:
            keys = self._root.list(f"corpora/{folder}/" if folder else "corpora/")
            self._keys[folder] = [key for key in keys if key.endswith(f"/{MANIFEST_KEY}") and key.count("/") == 3]
        return self._keys[folder]

    def _open(self, corpus: Store) -> FoundCorpus:
        if corpus.uri not in self._opened:
            self._opened[corpus.uri] = FoundCorpus(corpus, load_manifest(corpus))
        return self._opened[corpus.uri]


def prepared_corpus(root: Store, name: str) -> FoundCorpus:
    """The finished corpus of a name, as `Corpora.find`."""
    return Corpora(root).find(name)
