"""Data sets whose splits are defined by lists: images in an archive, lists in the archive or next to it."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from vitline.data_prep.archives.matlab_file import read_mat
from vitline.data_prep.benchmarks.annotation_files import annotation_texts
from vitline.data_prep.benchmarks.labelled_archive import LabelledArchive
from vitline.data_prep.benchmarks.official_files import official_files

_MAX_LIST_BYTES = 64 << 20


class ListedArchive(LabelledArchive):
    """Every image of the archive that is in a list."""

    @abstractmethod
    def _lines(self) -> Iterator[tuple[str, str, int]]:
        """(key, TFDS split, label) of every listed image. Raises ValueError if a list is wrong."""

    def labels(self) -> Mapping[str, Mapping[str, int]]:
        labels, splits = dict[str, dict[str, int]](), dict[str, str]()
        for key, split, label in self._lines():
            if key in splits:
                raise self.wrong(f"its lists contain {key} twice, in {splits[key]} and {split}")
            splits[key] = split
            labels.setdefault(split, {})[key] = label
        return labels

    def _texts(self, name: str, paths: Iterable[str]) -> dict[str, list[str]]:
        """The lines of text files in the archive or folder `name`, by their paths below its top folder."""
        key, wanted, found = self.file(name), set(paths), dict[str, list[str]]()
        for path, text in annotation_texts(self.store, key, lambda path: _below(path) in wanted):
            found[_below(path)] = text.split("\n")
            if len(found) == len(wanted):  # the rest of the archive need not be read
                break
        if missing := wanted - found.keys():
            raise self.wrong(f"{key} lacks {', '.join(sorted(missing))}")
        return found


def _below(path: str) -> str:
    return path.partition("/")[2]


class Dtd(ListedArchive):
    """Textures; the first of ten official splits. Keys are <class>/<file>, classes are in alphabetical order."""

    official = official_files("dtd")

    def class_names(self) -> Sequence[str]:
        return sorted({key.partition("/")[0] for labels in self.checked_labels.values() for key in labels})

    def _lines(self) -> Iterator[tuple[str, str, int]]:
        lists = {"labels/train1.txt": "train", "labels/val1.txt": "validation", "labels/test1.txt": "test"}
        texts = self._texts("dtd-r1.0.1.tar.gz", lists)
        rows = [(line.strip(), split, path) for path, split in lists.items() for line in texts[path] if line.strip()]
        for key, _, path in rows:
            if not re.fullmatch(r"[^/]+/[^/]+", key):
                raise self.wrong(f"{path} has the line {key!r:.80}; expected lines such as banded/banded_0002.jpg")
        numbers = {name: i for i, name in enumerate(sorted({key.partition("/")[0] for key, _, _ in rows}))}
        for key, split, _ in rows:
            yield key, split, numbers[key.partition("/")[0]]

    def key_of(self, path: str) -> str:
        return "/".join(path.split("/")[-2:])


class Pets(ListedArchive):
    """Cats and dogs of 37 breeds. Keys are file names. Some files named .jpg are PNG or GIF."""

    official = official_files("pets")

    def class_names(self) -> Sequence[str]:
        names: dict[int, str] = {}
        for key, label in (row for labels in self.checked_labels.values() for row in labels.items()):
            breed = _breed(key)
            if names.setdefault(label, breed) != breed:
                raise self.wrong(f"its lists call class {label + 1} both {names[label]} and {breed}")
        if sorted(names) != [*range(len(names))]:
            raise self.wrong(f"its lists have {len(names)} classes up to number {max(names) + 1}")
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
                    raise self.wrong(f"{path} has the line {line!r:.80}; expected lines such as Abyssinian_100 1 1 1")
                yield f"{row[1]}.jpg", split, int(row[2]) - 1

    def key_of(self, path: str) -> str:
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
            raise self.wrong(f"{name} is {error}") from error
        numbers = []
        for variable in variables:
            values = found.get(variable)
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf":
                raise self.wrong(f"{name} has no numeric variable {variable}")
            whole = values.astype(np.int64)
            if (whole != values).any() or (whole < 1).any() or (whole > last).any():
                raise self.wrong(f"{variable} of {name} has numbers outside of 1 to {last:,}")
            numbers.append(whole.tolist())
        return numbers

    def key_of(self, path: str) -> str:
        return path.rpartition("/")[2]
