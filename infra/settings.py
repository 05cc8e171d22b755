"""Settings from environment variables: roots, addresses, endpoints. Beside this module only `infra/environment` reads such variables.

Commands, workers and senders set those that are not set to the values of `vitline.toml`, so that children and libraries get them, too.

Credentials of object stores are not included: botocore reads them itself, and vitline does not pass them on.
"""

import base64
import contextlib
import getpass
import os
import re
import shutil
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_validator

from vitline.infra.environment.certificates import checked_authority, trust_own_authority
from vitline.infra.environment.proxies import reach_this_machine_directly

_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|AUTH|CREDENTIAL")
_FOLDERS = {"root", "home", "config", "ray_auth_token_path", "job_python"}
"""Settings that name a folder or file."""
_ADDRESSES = {
    "s3_endpoint_url": "http://HOST:9000",
    "mlflow_tracking_uri": "http://HOST:5000",
    "prefect_api_url": "http://HOST:4200/api",
}
"""Settings that are addresses of servers, each with an example. RAY_ADDRESS is none: Ray sets it to another one in its jobs."""
_VARIABLES = {
    "s3_endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "s3_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?|\[[\da-fA-F:]+\]:\d+(/.*)?")
_FOR_A_SHELL = re.compile(r"[\"'$]")
_LABEL = re.compile(r"[\w./-]+=[\w.-]*")
_LOCALHOST = re.compile(r"^(https?://)localhost(?=[:/]|$)", re.IGNORECASE)
LOGIN_IN_ADDRESS = re.compile(r"://[^/\s]*@")
_SET_BY: dict[str, tuple[str, str]] = {}
"""The variables of this process that `join_environment` has set: value and source."""
_SECRET_LENGTH = 8  # shorter values also occur in ordinary text, which must not be changed


DEFAULT_PROJECT = "vitline"


class Settings(BaseModel):
    """The settings of this process. Arguments take precedence over environment variables; an empty variable counts as unset.

    The variables are read without pydantic-settings, whose import would delay every command by 0.2 s.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    root: str = Field(default_factory=lambda: str(Path.cwd() / ".vitline" / "store"))
    """The root, below which corpora, runs and models are stored: a path, or a file://, s3://, gs:// or az:// URI."""
    project: str = DEFAULT_PROJECT
    """The name of a root's work on servers that several roots share: it names deployments, work pool, home page and alerts in
    Prefect, and experiments, registered models and saved views in MLflow. Set it to the same name wherever this root is used."""
    home: Path | None = None
    """Folder for logs and the local stack. None: the parent folder of a root on this machine, else `.vitline` in
    the current folder."""
    ca: str | None = None
    """A PEM file with the certificates of your own authority, which all clients (of stores, Prefect, MLflow and Ray's job server)
    trust beside the public ones. Jobs get its text."""
    config: Path | None = None
    """A file of settings. None: `vitline.toml` in the current folder or one above it, up to the repository or home folder."""
    ray_address: str | None = None
    """The http URL of the Ray job server. None: Ray is started on this machine."""
    ray_auth_token: SecretStr | None = None
    """The token of the Ray cluster, if it is not in a file."""
    ray_auth_token_path: Path | None = None
    """The file with the token of the Ray cluster."""
    one_node_ray: bool = False
    """Set in the processes of a one-node Ray, to which no node can be added."""
    job_python: str | None = None
    """The Python of the drivers of jobs, as a command or path on the nodes; workers run in that of `ray start`. None: `python` of the
    nodes, or this Python on a Ray that was started from here."""
    node_labels: Mapping[str, str] = {}
    """Labels of the nodes of the Ray cluster that jobs use, as in pool=birds,zone=a (`ray start --labels`). Jobs get the setting of the
    flow or command that submits them. Empty: all nodes."""
    submitted_from: str | None = None
    """Set in jobs, never by hand: the versions of the process that submitted the job, as JSON."""
    time_left_s: float | None = None
    """Set in jobs, never by hand: the seconds from the start of the job to the deadline of its flow run. None: no deadline."""
    s3_endpoint_url: str | None = None
    """URL of an S3 service other than AWS."""
    s3_region: str | None = None
    """Region of the S3 service. botocore itself reads only AWS_DEFAULT_REGION."""

    mlflow_tracking_uri: str | None = None
    """The MLflow server. None: runs are only in the store, from where `vitline runs send` can send them later."""
    mlflow_tracking_username: str | None = None
    """The user of an MLflow server that asks for one."""
    mlflow_tracking_password: SecretStr | None = None
    """The password of that user."""
    mlflow_tracking_token: SecretStr | None = None
    """A token in place of user and password."""
    recipe_packages: frozenset[str] = frozenset()
    """Python packages, separated by commas, whose code vitline may import: functions that forms name as recipes (commands may name any),
    networks, and losses. Jobs get the setting of the flow or command that submits them."""
    prefect_api_url: str | None = None
    """The API of the Prefect server, such as http://127.0.0.1:4200/api."""
    prefect_ui_url: str | None = None
    """The address of Prefect's pages in links. None: the pages that the server of PREFECT_API_URL shows by default."""
    prefect_api_auth_string: SecretStr | None = None
    """The login of a Prefect server of your own, such as admin:pass."""
    prefect_api_key: SecretStr | None = None
    """The key of Prefect Cloud."""
    _sources: dict[str, str] = PrivateAttr()

    @field_validator("recipe_packages", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        return filter(None, (name.strip() for name in value.split(","))) if isinstance(value, str) else value

    @field_validator("node_labels", mode="before")
    @classmethod
    def _labels(cls, value: Any) -> Any:
        return _pairs("VITLINE_NODE_LABELS", value) if isinstance(value, str) else value

    @field_validator("project")
    @classmethod
    def _plain_name(cls, project: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", project):
            raise ValueError(
                f"VITLINE_PROJECT={project!r} cannot name a project. Use up to 40 characters of a-z, 0-9 and '-', beginning with a "
                "letter, such as 'birds'."
            )
        return project

    def named(self, name: str) -> str:
        """`name` of a deployment or registered model on a shared server: `<project>-<name>`, or `name` in the default project."""
        return name if self.project == DEFAULT_PROJECT else f"{self.project}-{name}"

    def __init__(self, **given: Any) -> None:
        """`given`: settings by their names, or by those of their variables."""
        found: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for field in type(self).model_fields:
            names = variables_of(field)
            if name := next((name for name in (field, *names) if name in given), None):
                found[field] = expanded(given[name]) if field == "root" else given[name]
                sources[field] = "the command"
            elif name := next((name for name in names if os.environ.get(name)), None):
                found[field] = checked(field, name, os.environ[name])
                value, source = _SET_BY.get(name, ("", ""))
                sources[field] = source if value == os.environ[name] else name
        super().__init__(**found)
        self._sources = sources

    @property
    def sources(self) -> dict[str, str]:
        """Where each setting that is not at its default comes from: a variable, `the local stack`, a file, or `the command`."""
        return self._sources

    def job_server(self) -> str | None:
        """The URL of Ray's job server; None: Ray is started on this machine. Raises ValueError for another kind of address."""
        if self.ray_address and not self.ray_address.startswith(("http://", "https://")):
            raise ValueError(
                f"RAY_ADDRESS is {self.ray_address}, but vitline needs the http URL of Ray's job server, such as "
                "http://HOST:8265 (the address of Ray's dashboard)."
            )
        return self.ray_address

    def ray_token(self) -> str | None:
        """The token for the job server; None if there is none, neither set nor where Ray itself looks last."""
        if self.ray_auth_token:
            return self.ray_auth_token.get_secret_value()
        kept = Path(os.path.expanduser("~/.ray/auth_token"))
        path = self.ray_auth_token_path or (kept if kept.exists() else None)
        return path.read_text().strip() if path else None

    def python_of_jobs(self) -> str:
        """VITLINE_JOB_PYTHON, else this Python on a Ray that is started here, else `python` of the nodes."""
        return self.job_python or (sys.executable if self.ray_address is None else "python")

    def node_labels_text(self) -> str:
        """`pool=birds,zone=a`, as VITLINE_NODE_LABELS has them; empty for all nodes."""
        return ",".join(f"{name}={value}" for name, value in self.node_labels.items())

    def prefect_headers(self) -> dict[str, str]:
        """The headers with which this process logs in to Prefect."""
        if self.prefect_api_auth_string:
            return {"Authorization": basic_authorization(self.prefect_api_auth_string.get_secret_value())}
        return {"Authorization": f"Bearer {self.prefect_api_key.get_secret_value()}"} if self.prefect_api_key else {}

    def mlflow_headers(self) -> dict[str, str]:
        """The headers with which this process logs in to MLflow."""
        if self.mlflow_tracking_username and self.mlflow_tracking_password:
            return {"Authorization": basic_authorization(self.mlflow_login())}
        token = self.mlflow_tracking_token
        return {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}

    def mlflow_login(self) -> str:
        """`user:password`. Raises ValueError if one of them is not set."""
        if not (self.mlflow_tracking_username and self.mlflow_tracking_password):
            raise ValueError("Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.")
        return f"{self.mlflow_tracking_username}:{self.mlflow_tracking_password.get_secret_value()}"


def variables_of(field: str) -> tuple[str, ...]:
    """The environment variables of a setting, of which the first that is set counts."""
    own = field.upper() if field.startswith(("ray_", "mlflow_", "prefect_")) else f"VITLINE_{field.upper()}"
    return _VARIABLES.get(field, (own,))


def checked(field: str, name: str, value: str) -> str:
    """The value of a variable, or of a key in a file, that is called `name`. Raises ValueError for one that cannot be right."""
    if field in _ADDRESSES:
        return _address(field, name, value)
    if field == "ca":
        return checked_authority(name, value)
    if field == "node_labels":
        _pairs(name, value)
    if field not in _FOLDERS:
        return value
    if _FOR_A_SHELL.match(value):
        raise ValueError(
            f"{name} is {value}, with the quotes or variables of a shell, and no shell has read them. Write the path itself."
        )
    try:
        return expanded(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _pairs(name: str, value: str) -> dict[str, str]:
    pairs = [pair.strip() for pair in value.split(",")]
    if wrong := next((pair for pair in pairs if not _LABEL.fullmatch(pair)), None):
        raise ValueError(
            f"{name} is {value!r}, and {wrong!r} in it is no NAME=VALUE. Write labels as `ray start --labels` has them: pool=birds,zone=a."
        )
    return dict(pair.split("=") for pair in pairs)


def _address(field: str, name: str, value: str) -> str:
    example = _ADDRESSES[field]
    if field == "mlflow_tracking_uri" and not _HOST_AND_PORT.fullmatch(value) and not value.startswith("http"):
        return value  # MLflow knows more than servers, such as databricks
    if not re.match(r"https?://[^/]", value):
        raise ValueError(f"{name} is {value}, but an address begins with http:// or https://, as in {example}.")
    if field == "prefect_api_url" and not urlsplit(value).path.strip("/"):
        raise ValueError(f"{name} is {value}, which is Prefect's page. Its API is at {value.rstrip('/')}/api.")
    return value


def expanded(path: str) -> str:
    """A path or file:// URI with the home folder in place of a leading `~`, which shells leave in quotes and never see in files of
    variables. Raises ValueError if no such home folder is known.

    >>> expanded("s3://bucket/~/x")
    's3://bucket/~/x'
    """
    scheme = "file://" if path.startswith("file://") else ""
    found = os.path.expanduser(path.removeprefix(scheme))
    if found.startswith("~"):
        raise ValueError(
            f"{path} begins with a home folder that this machine does not know. Write the whole path, or ./~... for a folder of "
            "that name."
        )
    return scheme + found


def user_at_host() -> str:
    """`user@host`, for records. A user id without a name, as in a container that runs as a number, is `uid-54321`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the error of Python 3.13
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def basic_authorization(user_and_password: str) -> str:
    """The value of an Authorization header for `user:password`."""
    return f"Basic {base64.b64encode(user_and_password.encode()).decode()}"


def inherited_environment(without: Collection[str], **changes: str) -> dict[str, str]:
    """The environment of this process for a child process, without some variables and with `changes`."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    return inherited | _SAFE_PATH | changes


_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Like the option -P: `python -m` and `python -c` do not search the current folder, whose files may be named like modules."""


def set_environment(changes: Mapping[str, str]) -> None:
    """For entry points: changes the environment of this process, for libraries that it has not imported yet."""
    os.environ.update(changes)


def import_nothing_from_here() -> None:
    """For entry points: keeps the current folder out of the search path of all children of this process, such as workers of Prefect."""
    set_environment(_SAFE_PATH)


def reach_programs_beside_python(program: str) -> None:
    """Adds the folder of this Python to PATH for this process and its children, unless `program` is found already."""
    if shutil.which(program) is None:
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))


def secret_values() -> frozenset[str]:
    """The secrets of this process: values of environment variables whose names indicate a secret."""
    return frozenset(
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SECRET_LENGTH and not name.endswith(("_PATH", "_FILE", "_MODE"))
    )


NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",  # Prefect's SDK reports what it does unless this is set
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Turns off the telemetry of Prefect, MLflow and Ray."""


_LOGINS = {
    "PREFECT_API_URL": ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"),
    "MLFLOW_TRACKING_URI": ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
}
"""The variables of a server's login, by the variable of its address."""


SECRETS = {key for key, field in Settings.model_fields.items() if SecretStr in get_args(field.annotation)}
KEYS = Settings.model_fields.keys() - SECRETS - {"config", "one_node_ray", "submitted_from", "time_left_s"}
"""What `vitline.toml` may name."""


def refuse_login(where: str, address: str) -> None:
    """Raises ValueError for an address with a user or password in it, which is to be kept or shown."""
    if LOGIN_IN_ADDRESS.search(address):
        raise ValueError(
            f"{where} has a user or password in the address. Write it without; a login belongs into variables of its own, such as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or PREFECT_API_AUTH_STRING."
        )


def join_environment(
    defaults: Mapping[str, str], instead_of: tuple[str, ...] = (), source: str = "the environment"
) -> None:
    """Sets environment variables of this process and its later children that are not set yet, or empty.

    Removes variables whose names start with one of `instead_of` first, so that the credentials of two stores do not mix. For
    the same reason a login is set together with the address of its server, or not at all. An address that names the server by
    `localhost` is replaced by that with 127.0.0.1: behind `localhost` another program may listen on [::1], which would get the
    login. The login of the environment is for an address that comes without a secret. `source` says in words where the defaults come from.
    """
    defaults = dict(defaults)
    for name in [name for name in os.environ if instead_of and name.startswith(instead_of)]:
        del os.environ[name]
    for address, login in _LOGINS.items():
        if address in defaults:
            ours = by_number(os.environ.get(address) or defaults[address]) == by_number(defaults[address])
            if ours and address in os.environ:
                os.environ[address] = defaults[address]
            if not ours:
                defaults = {name: value for name, value in defaults.items() if name not in login}
            elif any(map(_SECRET_NAME.search, defaults.keys() & {*login})):
                for name in login:
                    os.environ.pop(name, None)
    for name, value in defaults.items():
        if not os.environ.get(name):
            os.environ[name] = value
            _SET_BY[name] = value, source
    reach_this_machine_directly()
    trust_own_authority()


def by_number(url: str) -> str:
    """An http URL with 127.0.0.1 in place of `localhost`, without a final slash."""
    return _LOCALHOST.sub(r"\g<1>127.0.0.1", url).rstrip("/")


@contextlib.contextmanager
def joined_environment(defaults: Mapping[str, str], instead_of: tuple[str, ...] = ()) -> Iterator[None]:
    """`join_environment` while the context is open; afterwards all variables are restored."""
    before = dict(os.environ)
    try:
        join_environment(defaults, instead_of)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def changed_environment(**changes: str | None) -> Iterator[None]:
    """Sets environment variables of this process and its later children while the context is open; None unsets one."""
    before = {name: os.environ.get(name) for name in changes}
    _set_variables(changes)
    try:
        yield
    finally:
        _set_variables(before)


def variables_with_end(beginnings: tuple[str, ...], end: str) -> dict[str, str | None]:
    """The changes by which the variables with these beginnings are those that also have this end, without it; all others are unset."""
    here = {name: value for name, value in os.environ.items() if name.startswith(beginnings)}
    found = {name.removesuffix(end): value for name, value in here.items() if name.endswith(end)}
    return {**dict.fromkeys(here), **found}


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# Here, as not every process has a start of ours: workers of Ray, flows of Prefect, notebooks.
reach_this_machine_directly()
trust_own_authority()
