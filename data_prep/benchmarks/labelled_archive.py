"""Data sets that are images in an archive or a folder, with labels by key."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

from vitline.data_prep.archives.archive_members import Member
from vitline.data_prep.benchmarks.annotation_files import keep_labels, kept_labels
from vitline.data_prep.benchmarks.image_files import image_members, image_parts
from vitline.data_prep.benchmarks.vtab_data import BenchmarkData, Found, Key
from vitline.data_prep.decode import ImageRejected
from vitline.data_prep.sources.raw import SourcePart, WorkFolder


class LabelledArchive(BenchmarkData):
    """The first official file holds the images. Labels are read once, when parts are listed, and kept for the workers."""

    @abstractmethod
    def labels(self) -> Mapping[str, Mapping[str, int]]:
        """Class by TFDS split and key of every image that the benchmark uses. Raises ValueError if a file is not as expected."""

    @abstractmethod
    def key_of(self, path: str) -> str | None:
        """The key of the image with this path; None for any other file."""

    def made(self, data: bytes) -> bytes:
        """The image that TFDS stores for a file: by default the file itself. Raises ImageRejected."""
        return data

    def members(
        self, part: SourcePart, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[Member, bytes | None, tuple[str, int, int] | None]]:
        """As `image_members`."""
        return image_members(self.store, part, self.max_bytes, wanted)

    @property
    def archive(self) -> str:
        return self.file(self.official.files[0].name)

    @cached_property
    def checked_labels(self) -> Mapping[str, Mapping[str, int]]:
        """`labels`. Raises ValueError if a key is in two splits."""
        labels, splits = self.labels(), dict[str, str]()
        for split, of_split in labels.items():
            for key in of_split:
                if (other := splits.setdefault(key, split)) != split:
                    raise self.wrong(f"{key} is in {other} and in {split}")
        return labels

    def wrong(self, what: str) -> ValueError:
        """The error for files that contradict each other."""
        return self.official.damaged(f"{self.official.title} at {self.store.uri}", what)

    def keys(self) -> Mapping[str, Sequence[Key]]:
        return {split: list(of_split) for split, of_split in self.checked_labels.items()}

    def parts(self, work: WorkFolder) -> Iterator[SourcePart]:
        keep_labels(work, self.checked_labels)
        yield from image_parts(self.store, self.archive, work)

    def images(self, part: SourcePart, work: WorkFolder) -> Iterator[Found]:
        labels = kept_labels(work)
        for member, data, where in self.members(part, lambda path: self.key_of(path) in labels):
            key = self.key_of(member.path) or member.path
            split, label = labels.get(key, ("train", -1))
            if member.refused:
                yield Found(split, key, refused=member.refused)
            elif data is not None:
                try:
                    image = self.made(data)
                except ImageRejected as error:
                    yield Found(split, key, refused=(error.reason, error.detail))
                else:
                    yield Found(split, key, label, image, where if image is data else None)
