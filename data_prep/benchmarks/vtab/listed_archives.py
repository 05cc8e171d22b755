"""Data sets whose splits are defined by lists: images in an archive, lists in the archive or next to it."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from vitline.data_prep.archives.archives import read_members
from vitline.data_prep.archives.matlab_file import read_mat
from vitline.data_prep.benchmarks.official_files import official_files
from vitline.data_prep.benchmarks.picture_files import picture_members, picture_parts
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.sources.raw import Part, WorkFolder

_LISTING = "listing.json"
_MAX_LIST_BYTES = 64 << 20


class ListedArchive(BenchmarkData):
    """The first official file holds the images. The content of the lists is kept in the work folder for the workers."""

    @abstractmethod
    def _lines(self) -> Iterator[tuple[str, str, int]]:
        """(key, TFDS split, label) of every listed image. Raises ValueError if a list is wrong."""

    @abstractmethod
    def _key(self, path: str) -> str:
        """The key of the image with this path."""

    def keys(self) -> Mapping[str, Sequence[Key]]:
        keys: dict[str, list[Key]] = {}
        for key, (split, _) in self._listing.items():
            keys.setdefault(split, []).append(key)
        return keys

    def parts(self, work: WorkFolder) -> Iterator[Part]:
        work.store.write_json(_LISTING, self._listing)
        yield from picture_parts(self.store, self.file(self.official.files[0].name), work)

    def pictures(self, part: Part, work: WorkFolder) -> Iterator[Found]:
        listing = work.store.read_json(_LISTING)
        for member, data, where in picture_members(
            self.store, part, self.max_bytes, lambda path: self._key(path) in listing
        ):
            key = self._key(member.path)
            split, label = listing.get(key, ("train", -1))
            if member.refused:
                yield Found(split, key, refused=member.refused)
            else:
                yield Found(split, key, label, data, where)

    @cached_property
    def _listing(self) -> dict[str, tuple[str, int]]:
        """Split and label by key."""
        listing: dict[str, tuple[str, int]] = {}
        for key, split, label in self._lines():
            if key in listing:
                raise self._wrong(f"its lists contain {key} twice, in {listing[key][0]} and {split}")
            listing[key] = split, label
        return listing

    def _texts(self, name: str, paths: Iterable[str]) -> dict[str, list[str]]:
        """The lines of text files in the archive or folder `name`, by their paths below its top folder."""
        key, wanted, found, damage = self.file(name), set(paths), dict[str, bytes](), ""
        if key.endswith("/"):
            there = {listed.key for listed in self.store.scan(key)}
            found = {path: self.store.read(key + path, 0, _MAX_LIST_BYTES) for path in wanted if key + path in there}
        else:
            for member, data in read_members(
                self.store, key, _MAX_LIST_BYTES, wanted=lambda member: _below(member.path) in wanted
            ):
                if data is not None:
                    found[_below(member.path)] = data
                damage = f": {member.refused[1]}" if member.kind == "damage" and member.refused else damage
                if len(found) == len(wanted):
                    break
        if missing := wanted - found.keys():
            raise self._wrong(f"{key} lacks {', '.join(sorted(missing))}{damage}")
        return {path: data.decode(errors="replace").split("\n") for path, data in found.items()}

    def _wrong(self, what: str) -> ValueError:
        return ValueError(
            f"{self.official.title} at {self.store.uri}: {what}. Download the files again from {self.official.home}."
        )


def _below(path: str) -> str:
    return path.partition("/")[2]


class Dtd(ListedArchive):
    """Textures; the first of ten official splits. Keys are <class>/<file>, classes are in alphabetical order."""

    official = official_files("dtd")

    def class_names(self) -> Sequence[str]:
        return sorted({key.partition("/")[0] for key in self._listing})

    def _lines(self) -> Iterator[tuple[str, str, int]]:
        lists = {"labels/train1.txt": "train", "labels/val1.txt": "validation", "labels/test1.txt": "test"}
        texts = self._texts("dtd-r1.0.1.tar.gz", lists)
        rows = [(line.strip(), split, path) for path, split in lists.items() for line in texts[path] if line.strip()]
        for key, _, path in rows:
            if not re.fullmatch(r"[^/]+/[^/]+", key):
                raise self._wrong(f"{path} has the line {key!r:.80}; expected lines such as banded/banded_0002.jpg")
        numbers = {name: i for i, name in enumerate(sorted({key.partition("/")[0] for key, _, _ in rows}))}
        for key, split, _ in rows:
            yield key, split, numbers[key.partition("/")[0]]

    def _key(self, path: str) -> str:
        return "/".join(path.split("/")[-2:])


class Pets(ListedArchive):
    """Cats and dogs of 37 breeds. Keys are file names. Some files named .jpg are PNG or GIF."""

    official = official_files("pets")

    def class_names(self) -> Sequence[str]:
        names: dict[int, str] = {}
        for key, (_, label) in self._listing.items():
            breed = _breed(key)
            if names.setdefault(label, breed) != breed:
                raise self._wrong(f"its lists call class {label + 1} both {names[label]} and {breed}")
        if sorted(names) != [*range(len(names))]:
            raise self._wrong(f"its lists have {len(names)} classes up to number {max(names) + 1}")
        return [names[label] for label in range(len(names))]

    def _lines(self) -> Iterator[tuple[str, str, int]]:
        lists = {"trainval.txt": "train", "test.txt": "test"}
        texts = self._texts("annotations.tar.gz", lists)
        for path, split in lists.items():
            for line in texts[path]:
                if not line.strip() or line.startswith("#"):
                    continue
                row = re.fullmatch(
                    r"(\S+_\d+) ([1-9]\d{0,3})(?: -?\d+)*\s*", line
                )  # file, class, species, breed within the species
                if not row:
                    raise self._wrong(f"{path} has the line {line!r:.80}; expected lines such as Abyssinian_100 1 1 1")
                yield f"{row[1]}.jpg", split, int(row[2]) - 1

    def _key(self, path: str) -> str:
        return path.rpartition("/")[2]


def _breed(key: str) -> str:
    return key.rpartition("_")[0]


_FLOWERS_TEXT = (
    "pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon orchid, "
    "bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris, "
    "globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower, "
    "fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke, "
    "sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya, "
    "cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily, poinsettia, "
    "bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula, "
    "sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia, cautleya spicata, "
    "japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus, bearded iris, "
    "windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower, lotus, "
    "toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen, "
    "watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow, "
    "mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry lily"
)
_FLOWERS = tuple(_FLOWERS_TEXT.split(", "))


class Flowers102(ListedArchive):
    """Flowers common in the United Kingdom. Keys are file names. The files have class numbers but no class names."""

    official = official_files("flowers102")

    def class_names(self) -> Sequence[str]:
        return _FLOWERS

    def _lines(self) -> Iterator[tuple[str, str, int]]:
        (labels,) = self._numbers("imagelabels.mat", ("labels",), len(_FLOWERS))
        splits = {"trnid": "train", "valid": "validation", "tstid": "test"}
        for split, images in zip(splits.values(), self._numbers("setid.mat", splits, len(labels)), strict=True):
            for image in images:
                yield f"image_{image:05d}.jpg", split, labels[image - 1] - 1

    def _numbers(self, name: str, variables: Iterable[str], last: int) -> list[list[int]]:
        """Variables of a MATLAB file that consist of numbers from 1 to `last`."""
        try:
            found = read_mat(self.store.read(name, 0, _MAX_LIST_BYTES))
        except ValueError as error:
            raise self._wrong(f"{name} is {str(error).rstrip('.')}") from error
        numbers = []
        for variable in variables:
            values = found.get(variable)
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf":
                raise self._wrong(f"{name} has no numeric variable {variable}")
            whole = values.astype(np.int64)
            if (whole != values).any() or (whole < 1).any() or (whole > last).any():
                raise self._wrong(f"{variable} of {name} has numbers outside of 1 to {last:,}")
            numbers.append(whole.tolist())
        return numbers

    def _key(self, path: str) -> str:
        return path.rpartition("/")[2]
