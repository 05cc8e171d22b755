"""Members of an npm package: by checksum, by range, and nothing unpacked."""

import hashlib

import pytest

from vitline.data_prep.examples import npm_package
from vitline.data_prep.examples.npm_package import NpmPackage, fetch_packages
from vitline.data_prep.sources.raw import FetchUnavailable
from vitline.infra.storage import open_store

from ....tars import link_of, tar_of


@pytest.fixture
def hostile(tmp_path):
    files = [("package/img/a.png", b"one"), ("package/big.zip", b"no"), ("package/../../img/b", b"up")]
    data = tar_of([*files, link_of("package/img/link", "/etc/passwd")], "w:gz")
    (tmp_path / "fake-1.0.0.tgz").write_bytes(data)
    return NpmPackage(name="fake", version="1.0.0", sha256=hashlib.sha256(data).hexdigest())


def test_only_wanted_members_are_kept_and_nothing_is_written_outside_the_cache(hostile, tmp_path):
    cache = open_store(tmp_path)
    before = set(tmp_path.rglob("*"))
    [members] = fetch_packages([hostile], cache, lambda name: "img/" in name)
    assert {name: cache.read(hostile.members_key, m.offset, m.offset + m.length) for name, m in members.items()} == {
        "img/a.png": b"one",
        "../../img/b": b"up",  # only a name in the index, never used as a path
    }
    kept = {path.relative_to(tmp_path).as_posix() for path in set(tmp_path.rglob("*")) - before}
    assert kept == {"fake-1.0.0", "fake-1.0.0/members.bin", "fake-1.0.0/index.json"}
    (tmp_path / "fake-1.0.0.tgz").unlink()
    assert fetch_packages([hostile], cache, lambda name: False) == [members]  # from the cache, without npm


def test_another_archive_is_refused(hostile, tmp_path):
    other = hostile.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(RuntimeError, match="but 0000") as caught:
        fetch_packages([other], open_store(tmp_path), lambda name: True)
    assert not isinstance(caught.value, FetchUnavailable)


def test_a_missing_or_failing_npm_raises_fetch_unavailable(tmp_path, monkeypatch):
    package = NpmPackage(name="fake", version="1.0.0", sha256="0" * 64)
    monkeypatch.setattr(npm_package.shutil, "which", lambda name: None)
    with pytest.raises(FetchUnavailable, match="npm is not installed"):
        fetch_packages([package], open_store(tmp_path), lambda name: True)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "npm").write_text("#!/bin/sh\necho 'E404 no such package' >&2\nexit 1\n")
    (bin_folder / "npm").chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{bin_folder}:/bin:/usr/bin")
    with pytest.raises(FetchUnavailable, match=r"fake@1.0.0: E404"):
        fetch_packages([package], open_store(tmp_path), lambda name: True)


def test_what_is_missing_is_fetched_by_one_call_and_scoped_names_stay_below_the_cache(tmp_path, monkeypatch):
    """npm writes `scope-name-1.0.0.tgz` for `@scope/name`."""
    data = tar_of({"package/icons.json": b"{}"}, "w:gz")
    names = "@icons/a", "@icons/b", "c"
    packages = [NpmPackage(name=name, version="1.0.0", sha256=hashlib.sha256(data).hexdigest()) for name in names]
    bin_folder, cache = tmp_path / "bin", tmp_path / "cache"
    bin_folder.mkdir()
    cache.mkdir()
    for package in packages[:2]:
        (bin_folder / package.archive).write_bytes(data)
    (cache / packages[2].archive).write_bytes(data)
    script = f'#!/bin/sh\necho "$2 $3" >> {tmp_path}/calls\ncp {bin_folder}/*.tgz "$5"\n'
    (bin_folder / "npm").write_text(script)
    (bin_folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/bin:/usr/bin")
    for _ in range(2):
        found = fetch_packages(packages, open_store(cache), lambda name: name == "icons.json")
        assert [list(members) for members in found] == [["icons.json"]] * 3
    assert (tmp_path / "calls").read_text() == "@icons/a@1.0.0 @icons/b@1.0.0\n"
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [
        "c-1.0.0",
        "icons-a-1.0.0",
        "icons-b-1.0.0",
    ]
