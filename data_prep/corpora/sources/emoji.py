"""Noto and Twitter emoji of 64 pixels; the subcategory is the class.

Splits are assigned to groups of base emoji that both styles share: bases with an identical image in either style (including skin
tones), and the versions of one motif for man, woman, person, boy, girl and child. Splitting by base alone would put identical images
into train and test.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from data_prep.config import CorpusRecipe, Emoji
from data_prep.corpora.files.npm_package import NpmPackage, PackageFile
from data_prep.corpora.raw import ListedCorpus, RawExample, WorkFolder
from data_prep.labels.classes import ClassInfo
from data_prep.splits import filled_splits
from infra.storage import Store, open_store

STYLES = ("google", "twitter")
PACKAGES = {
    "google": NpmPackage(
        name="emoji-datasource-google",
        version="16.0.0",
        sha256="fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    ),
    "twitter": NpmPackage(
        name="emoji-datasource-twitter",
        version="16.0.0",
        sha256="f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
    ),
}
_CREDITS = {
    "google": "Noto Emoji, Google, Apache-2.0; emoji-data, Cal Henderson, MIT",
    "twitter": "Twemoji, Twitter, Inc and contributors, CC BY 4.0; emoji-data, Cal Henderson, MIT",
}
_DATA = "emoji.json"
# The subcategories of Unicode's emoji-test.txt, as in emoji.json. They are repeated here so that parents of classes are known
# without the packages.
_SUBCATEGORIES = {
    "Activities": "arts & crafts, award-medal, event, game, sport",
    "Animals & Nature": "animal-amphibian, animal-bird, animal-bug, animal-mammal, animal-marine, animal-reptile, "
    "plant-flower, plant-other",
    "Component": "skin-tone",
    "Flags": "country-flag, flag, subdivision-flag",
    "Food & Drink": "dishware, drink, food-asian, food-fruit, food-prepared, food-sweet, food-vegetable",
    "Objects": "book-paper, clothing, computer, household, light & video, lock, mail, medical, money, music, "
    "musical-instrument, office, other-object, phone, science, sound, tool, writing",
    "People & Body": "body-parts, family, hand-fingers-closed, hand-fingers-open, hand-fingers-partial, hand-prop, "
    "hand-single-finger, hands, person, person-activity, person-fantasy, person-gesture, person-resting, person-role, "
    "person-sport, person-symbol",
    "Smileys & Emotion": "cat-face, emotion, face-affection, face-concerned, face-costume, face-glasses, face-hand, "
    "face-hat, face-negative, face-neutral-skeptical, face-sleepy, face-smiling, face-tongue, face-unwell, heart, "
    "monkey-face",
    "Symbols": "alphanum, arrow, av-symbol, currency, gender, geometric, keycap, math, other-symbol, punctuation, "
    "religion, transport-sign, warning, zodiac",
    "Travel & Places": "hotel, place-building, place-geographic, place-map, place-other, place-religious, "
    "sky & weather, time, transport-air, transport-ground, transport-water",
}
CATEGORY_OF = {name: category for category, names in _SUBCATEGORIES.items() for name in names.split(", ")}
# Joiner, variation selector, male and female sign do not change the motif.
_DROPPED_CODES = frozenset({"200D", "FE0F", "2640", "2642"})
_PEOPLE = frozenset({"1F468", "1F469", "1F9D1", "1F466", "1F467", "1F9D2"})


@dataclass(frozen=True)
class BaseEmoji:
    """An emoji without skin tone: its code, its classes, and the file names of its images, the plain one first."""

    code: str
    category: str
    subcategory: str
    pictures: tuple[str, ...]


class EmojiCorpus(ListedCorpus):
    """One style, as the pre-training corpus or as a task. Both use the same split of the groups."""

    def __init__(self, source: Emoji, recipe: CorpusRecipe) -> None:
        self._source, package = source, PACKAGES[source.style]
        self.origin = f"npm:{package.name}@{package.version}"
        self.credit = _CREDITS[source.style]
        if source.role == "task":
            train, val = f"train{source.num_train}", f"val{source.num_val}"
            self.views = {train: ("train",), val: ("val",), train + val: ("train", "val")}

    def fingerprint(self) -> str:
        return " ".join(PACKAGES[style].sha256 for style in STYLES)

    def listing(self, work: WorkFolder) -> Iterator[RawExample]:
        source = self._source
        cache = open_store(source.cache) if source.cache else work.root.child("sources")
        members = {style: fetch_style(style, cache) for style in STYLES}
        bases = read_bases(cache, members["google"][_DATA])
        pictures = {style: {name: kept.sha256 for name, kept in members[style].items()} for style in STYLES}
        groups = group_bases(bases, pictures)
        eligible = task_bases(bases, source.min_bases_per_class)
        sizes = dict.fromkeys(sorted(set(groups.values())), 0)
        for base in eligible:
            sizes[groups[base.code]] += 1
        splits = filled_splits(sizes, source.num_val, source.num_train)
        pretrain = source.role == "pretrain"
        for base in bases if pretrain else eligible:
            split = splits[groups[base.code]]
            if pretrain and split == "test":
                continue
            for picture in base.pictures if pretrain else base.pictures[:1]:
                member = members[source.style][_path(source.style, picture)]
                yield RawExample(
                    example_id=member.name,
                    labels=(base.subcategory,),
                    split=split,
                    base=cache.uri,
                    key=PACKAGES[source.style].members_key,
                    offset=member.offset,
                    length=member.length,
                    group=f"emoji/{groups[base.code]}",
                )

    def class_info(self, source_id: str) -> ClassInfo:
        return ClassInfo(name=source_id, source_id=source_id, parents=(CATEGORY_OF[source_id],))


def fetch_style(style: str, cache: Store) -> dict[str, PackageFile]:
    """Images and data of a style, by name in the package. Raises FetchUnavailable if they cannot be fetched."""
    return PACKAGES[style].fetched(cache, lambda name: name == _DATA or name.startswith(f"img/{style}/64/"))


class _SkinTone(TypedDict):
    image: str


class EmojiEntry(TypedDict):
    """A base emoji in emoji.json, as far as it is read here."""

    unified: str
    """Code points in hexadecimal, joined by dashes."""
    category: str
    subcategory: str
    image: str
    skin_variations: NotRequired[dict[str, _SkinTone]]


def read_bases(cache: Store, data: PackageFile) -> list[BaseEmoji]:
    """All base emoji of emoji.json, ordered by code."""
    offset, package = data.offset, PACKAGES["google"]
    entries: list[EmojiEntry] = json.loads(cache.read(package.members_key, offset, offset + data.length))
    bases = [
        BaseEmoji(
            code=entry["unified"],
            category=entry["category"],
            subcategory=entry["subcategory"],
            pictures=(entry["image"], *(tone["image"] for tone in entry.get("skin_variations", {}).values())),
        )
        for entry in entries
    ]
    return sorted(bases, key=lambda base: base.code)


def task_bases(bases: list[BaseEmoji], min_per_class: int) -> list[BaseEmoji]:
    """The bases of the subcategories that have at least `min_per_class` of them."""
    classes: defaultdict[str, list[BaseEmoji]] = defaultdict(list)
    for base in bases:
        classes[base.subcategory].append(base)
    return [base for base in bases if len(classes[base.subcategory]) >= min_per_class]


def group_bases(bases: list[BaseEmoji], pictures: dict[str, dict[str, str]]) -> dict[str, str]:
    """The group of every base code, named by the smallest code in it.

    `pictures`: sha256 of every image for each style. Bases are joined if they share an image or a motif.
    """
    together: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for base in bases:
        together["motif", motif(base.code)].append(base.code)
        for style, sha256 in pictures.items():
            for picture in base.pictures:
                together[style, sha256[_path(style, picture)]].append(base.code)
    parent = {base.code: base.code for base in bases}

    def root(code: str) -> str:
        while parent[code] != code:
            parent[code] = code = parent[parent[code]]
        return code

    for codes in together.values():
        for code in codes[1:]:
            low, high = sorted((root(codes[0]), root(code)))
            parent[high] = low
    return {code: root(code) for code in parent}


def motif(code: str) -> str:
    """A code sequence without gender: equal for the man, woman and person of one activity."""
    return "-".join("PERSON" if part in _PEOPLE else part for part in code.split("-") if part not in _DROPPED_CODES)


def _path(style: str, picture: str) -> str:
    return f"img/{style}/64/{picture}"
