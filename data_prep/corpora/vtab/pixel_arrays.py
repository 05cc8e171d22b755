"""Data sets of pixel arrays: each picture becomes a lossless PNG, and its key is its number in the array."""

from collections.abc import Iterator, Mapping, Sequence

from data_prep.corpora.cifar_archive import Cifar
from data_prep.corpora.lossless_png import lossless_png
from data_prep.corpora.raw import Part, Place
from data_prep.corpora.vtab.official_files import OfficialFile, OfficialFiles
from data_prep.corpora.vtab.vtab_data import Found, Key, VtabData
from infra.storage import Store


class Cifar100(VtabData):
    """The binary archive: the Python one is made of pickles."""

    official = OfficialFiles(
        title="CIFAR-100",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        terms="no licence stated; citation requested",
        files=(
            OfficialFile(
                name="cifar-100-binary.tar.gz",
                num_bytes=168_513_733,
                sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
    )

    def __init__(self, store: Store, task: str, max_bytes: int) -> None:
        super().__init__(store, task, max_bytes)
        self._arrays = Cifar(store.uri_of("cifar-100-binary.tar.gz"), "cifar100")

    def keys(self) -> Mapping[str, Sequence[Key]]:
        (part,) = self._arrays.parts(max_pixels=32 * 32)
        return {split: range(count) for split, count in self._arrays.num_pictures(part).items()}

    def class_names(self) -> Sequence[str]:
        return self._arrays.class_names()

    def parts(self, place: Place) -> Iterator[Part]:
        yield from self._arrays.parts(max_pixels=32 * 32)

    def pictures(self, part: Part, place: Place) -> Iterator[Found]:
        for picture in self._arrays.pictures(part):
            yield Found(str(picture.split), picture.number, picture.label, lossless_png(picture.pixels))
