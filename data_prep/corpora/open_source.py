"""A source from its config. A new source is one file and one line here."""

from data_prep.config import ClassFolders, CorpusConfig, Digits, Emoji
from data_prep.corpora.raw import RawCorpus


def open_source(config: CorpusConfig) -> RawCorpus:
    """The source of a request; nothing is read yet. Only the library that the source needs is imported."""
    match config.source:
        case ClassFolders():
            from data_prep.corpora.class_folders import ClassFolderCorpus

            return ClassFolderCorpus(config.source, config.recipe)
        case Emoji():
            from data_prep.corpora.emoji import EmojiCorpus

            return EmojiCorpus(config.source)
        case Digits():
            from data_prep.corpora.digits import DigitsCorpus

            return DigitsCorpus(config.source)
