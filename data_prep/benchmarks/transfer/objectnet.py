"""ObjectNet (Barbu et al., NeurIPS 2019): objects in unusual places and poses, of which 113 classes are classes of ImageNet.

An ObjectNet class may be several of ImageNet's (a chair is a barber chair, a folding chair or a rocking chair); each of them counts as
correct. Images of its other 200 classes are not read. The classes of the corpus are those of ImageNet that have images, among which a
model is to choose. The red border of the images is cut off, as those who test on them must.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vitline.data_prep.benchmarks.transfer.imagenet_folders import ImagenetSubset
from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examine.decode_sandboxed import decode_sandboxed
from vitline.infra.html.pictures import image_file

_FOLDERS, _CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
_MAX_MAPPING_BYTES = 1 << 20
BORDER_PX = 2
"""Cut off on each side, as in the code of arXiv:2109.01903."""


class ObjectNet(ImagenetSubset):
    """Test split only, several labels per image. Ids: test/chair_<file>."""

    single_label = False
    image = re.compile(r"(?:.*/)?(?P<folder>[^/]+)/([^/]+)", re.DOTALL)

    def labels_of(self, folder: str) -> tuple[str, ...]:
        return self._wnids.get(folder, ())

    def is_image(self, path: str) -> bool:
        return super().is_image(path) and path.split("/")[-2] in self._wnids

    def made(self, data: bytes) -> bytes:
        policy = DecodePolicy(max_bytes=self.max_bytes, min_side_px=2 * BORDER_PX + 1)
        inner = slice(BORDER_PX, -BORDER_PX)
        return image_file(decode_sandboxed(data, policy)[inner, inner])

    @cached_property
    def _wnids(self) -> Mapping[str, tuple[str, ...]]:
        """The WNIDs of each folder that has any. Raises ValueError for a name that is no class of the kit."""
        by_name = {self.kit.class_info(wnid).name: wnid for wnid in self.kit.classes}
        names, found = self._mapping(_CLASSES), dict[str, tuple[str, ...]]()
        for folder, label in self._mapping(_FOLDERS).items():
            of_label = names[label].split("; ") if label in names else []
            if unknown := [name for name in of_label if name not in by_name]:
                raise self.official.damaged(
                    self.store.uri_of(self.files()[_CLASSES].key), f"{unknown[0]!r} is no class of ImageNet"
                )
            if of_label:
                found[folder] = tuple(by_name[name] for name in of_label)
        return found

    def _mapping(self, name: str) -> dict[str, str]:
        key = self.files()[name].key
        try:
            found: Any = json.loads(self.store.read(key, 0, _MAX_MAPPING_BYTES))
            if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
                raise ValueError("it is no table of names")
        except (ValueError, RecursionError) as error:
            raise self.official.damaged(self.store.uri_of(key), error) from error
        return found
