"""Fetches chosen members of an npm package of an exact version, and keeps them in a store, verified by checksum.

The members are concatenated in one object with an index next to it. Nothing is unpacked to disk, so paths in the archive cannot do
harm, and every member can be read by range.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from data_prep.corpora.raw import FetchUnavailable
from infra.config import FrozenConfig
from infra.storage import Store

_FETCH_TIMEOUT_S = 600


class PackageFile(FrozenConfig):
    """A file of the package, and its range in the object of all members."""

    name: str
    offset: int
    length: int
    sha256: str


class PackageIndex(FrozenConfig):
    """The kept members of a package; written after their bytes."""

    package_sha256: str
    members: tuple[PackageFile, ...]


class NpmPackage(FrozenConfig):
    """An npm package whose archive has this sha256."""

    name: str
    version: str
    sha256: str

    @property
    def members_key(self) -> str:
        return f"{self.name}-{self.version}/members.bin"

    def fetched(self, cache: Store, wanted: Callable[[str], bool]) -> dict[str, PackageFile]:
        """The members whose name inside the package is `wanted`, from the cache or fetched into it by `npm pack`.

        An archive `<name>-<version>.tgz` in the cache is used instead of fetching. Raises FetchUnavailable if npm is missing or
        fails, and RuntimeError for an archive with another checksum.
        """
        index = self._index(cache)
        if index is None:
            with tempfile.TemporaryDirectory(prefix="vitline-npm-") as folder:
                archive = self._archive(cache, Path(folder))
                self._check(archive)
                index = self._keep(archive, cache, wanted)
        return {member.name: member for member in index.members}

    def is_kept(self, cache: Store) -> bool:
        """Whether the cache has the package already."""
        return self._index(cache) is not None

    def _index(self, cache: Store) -> PackageIndex | None:
        try:
            index = PackageIndex.model_validate(cache.read_json(self._index_key))
        except FileNotFoundError:
            return None
        return index if index.package_sha256 == self.sha256 and cache.exists(self.members_key) else None

    @property
    def _index_key(self) -> str:
        return f"{self.name}-{self.version}/index.json"

    def _archive(self, cache: Store, folder: Path) -> Path:
        file = folder / f"{self.name}-{self.version}.tgz"
        try:
            with cache.open(file.name) as given, file.open("wb") as copy:
                shutil.copyfileobj(given, copy)
        except FileNotFoundError:
            self._npm_pack(folder)
        if not file.exists():
            raise FetchUnavailable(
                f"npm pack did not write {file.name}, but {sorted(path.name for path in folder.iterdir())}."
            )
        return file

    def _npm_pack(self, folder: Path) -> None:
        what = f"{self.name}@{self.version}"
        if shutil.which("npm") is None:
            raise FetchUnavailable(
                f"npm is not installed, so {what} cannot be fetched. Install Node.js, which includes npm."
            )
        command = ["npm", "pack", what, "--pack-destination", str(folder), "--ignore-scripts", "--loglevel=error"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, cwd=folder)
        except subprocess.TimeoutExpired as error:
            raise FetchUnavailable(f"npm did not fetch {what} within {_FETCH_TIMEOUT_S} s. Try again.") from error
        if done.returncode:
            output = " ".join((done.stderr or done.stdout).split())[-300:]
            raise FetchUnavailable(f"npm cannot fetch {what}: {output} (npm's configuration determines the registry).")

    def _check(self, archive: Path) -> None:
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise RuntimeError(
                f"{self.name}@{self.version} has sha256 {found}, but {self.sha256} is expected: it is not the package that "
                "this code was written for. Remove it from the cache, or check what the registry serves."
            )

    def _keep(self, archive: Path, cache: Store, wanted: Callable[[str], bool]) -> PackageIndex:
        members, offset = [], 0
        with tarfile.open(archive, "r|gz") as tar, cache.writer(self.members_key) as kept:
            for info in tar:
                name = info.name.removeprefix("package/")
                content = tar.extractfile(info) if info.isreg() and wanted(name) else None
                if content is None:
                    continue
                data = content.read()
                kept.write(data)
                sha256 = hashlib.sha256(data).hexdigest()
                members.append(PackageFile(name=name, offset=offset, length=len(data), sha256=sha256))
                offset += len(data)
        index = PackageIndex(package_sha256=self.sha256, members=tuple(members))
        cache.write_json(self._index_key, index.model_dump(mode="json"))
        return index
