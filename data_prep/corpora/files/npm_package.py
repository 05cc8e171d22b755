"""Fetches chosen members of npm packages of exact versions, and keeps them in a store, verified by checksum.

The members are concatenated in one object with an index next to it. Nothing is unpacked to disk, so paths in the archive cannot do
harm, and every member can be read by range.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
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
        return f"{self._file_name}/members.bin"

    @property
    def spec(self) -> str:
        """As npm is told."""
        return f"{self.name}@{self.version}"

    @property
    def archive(self) -> str:
        """The file that `npm pack` writes."""
        return f"{self._file_name}.tgz"

    @property
    def _file_name(self) -> str:
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"

    def _index(self, cache: Store) -> PackageIndex | None:
        try:
            index = PackageIndex.model_validate(cache.read_json(self._index_key))
        except FileNotFoundError:
            return None
        return index if index.package_sha256 == self.sha256 and cache.exists(self.members_key) else None

    @property
    def _index_key(self) -> str:
        return f"{self._file_name}/index.json"

    def kept_from(self, folder: Path, cache: Store, wanted: Callable[[str], bool]) -> PackageIndex:
        """Verifies the archive in the folder and keeps its wanted members. Raises as `fetch_packages`."""
        archive = folder / self.archive
        if not archive.exists():
            raise FetchUnavailable(
                f"npm pack did not write {archive.name}, but {sorted(path.name for path in folder.iterdir())}."
            )
        self._check(archive)
        return self._keep(archive, cache, wanted)

    def _check(self, archive: Path) -> None:
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise RuntimeError(
                f"{self.spec} has sha256 {found}, but {self.sha256} is expected: it is not the package that "
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


def fetch_packages(
    packages: Sequence[NpmPackage], cache: Store, wanted: Callable[[str], bool]
) -> list[dict[str, PackageFile]]:
    """The members whose name inside their package is `wanted`, by name, for each package.

    What the cache lacks is fetched into it by one `npm pack`. An archive `<name>-<version>.tgz` in the cache is used instead.
    Raises FetchUnavailable if npm is missing or fails, and RuntimeError for an archive with another checksum.
    """
    indices = {package.spec: package._index(cache) for package in packages}
    missing = [package for package in packages if indices[package.spec] is None]
    with tempfile.TemporaryDirectory(prefix="vitline-npm-") as name:
        folder = Path(name)
        if absent := [package for package in missing if not _given(package, cache, folder)]:
            _npm_pack(absent, folder)
        for package in missing:
            indices[package.spec] = package.kept_from(folder, cache, wanted)
    return [{member.name: member for member in index.members} for index in indices.values() if index]


def _given(package: NpmPackage, cache: Store, folder: Path) -> bool:
    """Whether the cache holds the archive, which is then copied to the folder."""
    try:
        with cache.open(package.archive) as given, (folder / package.archive).open("wb") as copy:
            shutil.copyfileobj(given, copy)
    except FileNotFoundError:
        (folder / package.archive).unlink(missing_ok=True)
        return False
    return True


def _npm_pack(packages: Sequence[NpmPackage], folder: Path) -> None:
    specs = [package.spec for package in packages]
    what = specs[0] if len(specs) == 1 else f"{len(specs)} packages, from {specs[0]} to {specs[-1]},"
    if shutil.which("npm") is None:
        raise FetchUnavailable(
            f"npm is not installed, so {what} cannot be fetched. Install Node.js, which includes npm."
        )
    command = ["npm", "pack", *specs, "--pack-destination", str(folder), "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, cwd=folder)
    except subprocess.TimeoutExpired as error:
        raise FetchUnavailable(f"npm did not fetch {what} within {_FETCH_TIMEOUT_S} s. Try again.") from error
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())[-300:]
        raise FetchUnavailable(f"npm cannot fetch {what}: {output} (npm's configuration determines the registry).")
