"""What the environment says: roots, addresses, endpoints. No other file of the project reads environment variables.

Credentials of object storage are not here: botocore reads its own, and nothing of ours passes them on.
"""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr

_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|AUTH|CREDENTIAL")
_SECRET_LENGTH = 8  # what is shorter stands in innocent text too, and would be torn out of it


class Settings(BaseModel):
    """The settings of this process. An argument given in code wins over the environment, where a variable that is empty
    counts as absent. (Read by hand: importing pydantic-settings takes every command a fifth of a second.)"""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, use_attribute_docstrings=True)

    root: str = Field(
        default_factory=lambda: str(Path.cwd() / ".vitline" / "store"), validation_alias=AliasChoices("VITLINE_ROOT")
    )
    """Where corpora, runs and models live: a path or a URI, file:// or s3://."""
    home: Path | None = Field(default=None, validation_alias=AliasChoices("VITLINE_HOME"))
    """Folder for what is no artifact: logs, downloads, the local stack. None: beside a root on this machine, else
    `.vitline` in the current folder."""
    ray_address: str | None = Field(default=None, validation_alias=AliasChoices("RAY_ADDRESS"))
    """The http URL of the Ray job server; none means that the local stack starts one."""
    ray_auth_token: SecretStr | None = Field(default=None, validation_alias=AliasChoices("RAY_AUTH_TOKEN"))
    """The token of the Ray cluster, where it is not in a file."""
    ray_auth_token_path: Path | None = Field(default=None, validation_alias=AliasChoices("RAY_AUTH_TOKEN_PATH"))
    """The file with the token of the Ray cluster."""
    one_node_ray: bool = Field(default=False, validation_alias=AliasChoices("VITLINE_ONE_NODE_RAY"))
    """Set in the processes of a Ray of one machine: no node will ever join it."""
    job_python: str | None = Field(default=None, validation_alias=AliasChoices("VITLINE_JOB_PYTHON"))
    """The Python that runs the jobs, as a command or path on the nodes of the cluster. None: `python` there, and our own on
    a Ray that was started from here."""
    submitted_from: str | None = Field(default=None, validation_alias=AliasChoices("VITLINE_SUBMITTED_FROM"))
    """Set in jobs, never by hand: the versions of the process that submitted the job, JSON."""
    s3_endpoint_url: str | None = Field(
        default=None, validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    )
    """An S3 service other than AWS."""
    s3_region: str | None = Field(default=None, validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION"))
    """botocore itself knows only AWS_DEFAULT_REGION."""

    mlflow_tracking_uri: str | None = Field(default=None, validation_alias=AliasChoices("MLFLOW_TRACKING_URI"))
    """The MLflow server; none keeps runs in the store only, from where `vitline runs sync` can send them later."""
    prefect_api_url: str | None = Field(default=None, validation_alias=AliasChoices("PREFECT_API_URL"))
    """The API of the Prefect server, as in http://127.0.0.1:4200/api."""

    def __init__(self, **given: Any) -> None:
        found: dict[str, Any] = {}
        for field, info in type(self).model_fields.items():
            assert isinstance(info.validation_alias, AliasChoices)
            names = [str(name) for name in info.validation_alias.choices]
            values = [value for name in (*names, f"VITLINE_{field.upper()}") if (value := os.environ.get(name))]
            if values and not given.keys() & {field, *names}:
                found[field] = values[0]
        super().__init__(**found, **given)

    def ray_token(self) -> str | None:
        """The token that the job server wants; None leaves it to Ray's own search."""
        if self.ray_auth_token:
            return self.ray_auth_token.get_secret_value()
        return self.ray_auth_token_path.read_text().strip() if self.ray_auth_token_path else None


def inherited_environment(without: Collection[str], **changes: str) -> dict[str, str]:
    """This process's environment for a child process, some names left out and some set."""
    return {name: value for name, value in os.environ.items() if name not in without} | changes


def reach_programs_beside_python(program: str) -> None:
    """Lets this process and its children find what is installed beside its Python, unless `program` is found already."""
    if shutil.which(program) is None:
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))


def secret_values() -> frozenset[str]:
    """What this process must not let out: values of variables whose names say that they hold a secret."""
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
"""Keeps Prefect, MLflow and Ray from reporting home."""


def join_environment(defaults: Mapping[str, str], instead_of: tuple[str, ...] = ()) -> None:
    """Set variables of this process, and of those that it starts, that are not set yet.

    Variables whose names start with one of `instead_of` are forgotten first: half of one store's credentials beside
    half of another's would open neither.
    """
    for name in [name for name in os.environ if instead_of and name.startswith(instead_of)]:
        del os.environ[name]
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def joined_environment(defaults: Mapping[str, str], instead_of: tuple[str, ...] = ()) -> Iterator[None]:
    """`join_environment` for the time of the context; afterwards every variable is as it was."""
    before = dict(os.environ)
    try:
        join_environment(defaults, instead_of)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
