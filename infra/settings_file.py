"""`vitline.toml`: settings by their names, for those that the environment does not have. `use_settings_file` of settings.py sets them as
variables, so that children and libraries get them, too.

    root = "s3://my-bucket/vitline"
    mlflow_tracking_uri = "https://mlflow.example.org"

A file that was only found, in the current folder or one above it, may have been downloaded with other files. So it must belong to the
user (or root), and may not set what decides which code runs.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import SecretStr

from vitline.infra.names import known_names_text
from vitline.infra.settings import Settings, checked, variables_of

NAME = "vitline.toml"
_SECRETS = {key for key, field in Settings.model_fields.items() if SecretStr in get_args(field.annotation)}
KEYS = Settings.model_fields.keys() - _SECRETS - {"config", "one_node_ray", "submitted_from", "time_left_s"}
"""What a file may name."""
_PATHS = {"root", "home", "ray_auth_token_path"}
_CHOOSE_CODE = {"job_python", "recipe_packages"}
_LOGIN = re.compile(r"://[^/\s]*@")


def find_file(folder: Path) -> Path | None:
    """The file in `folder` or the nearest one above it, up to the repository or home folder. One of another user is named and left."""
    for place in (folder, *folder.parents):
        path = place / NAME
        if path.is_file():
            if path.stat().st_uid in (os.getuid(), 0):
                return path
            print(f"{path} is of another user and was not read; VITLINE_CONFIG={path} names it.", file=sys.stderr)
        if str(place) == os.path.expanduser("~") or (place / ".git").exists():
            break
    return None


def read_file(path: Path, *, named: bool) -> dict[str, str]:
    """The values of a file by setting, as variables have them; relative paths begin at the folder of the file.

    `named`: by VITLINE_CONFIG, instead of found. Raises ValueError with the line of what is wrong.
    """
    import tomllib

    try:
        text = path.read_text()
        content = tomllib.loads(text)
    except OSError as error:
        raise ValueError(
            f"VITLINE_CONFIG is {path}, which cannot be read ({error.strerror}). Correct or unset it."
        ) from error
    except ValueError as error:  # of TOML, or of text that is not UTF-8
        raise ValueError(f"{path} is not TOML: {error}.") from error
    return {key: _value(key, value, path, _place(path, text, key), named) for key, value in content.items()}


def refuse_login(where: str, address: str) -> None:
    """Raises ValueError for an address with a user or password in it, which is to be kept or shown."""
    if _LOGIN.search(address):
        raise ValueError(
            f"{where} has a user or password in the address. Write it without; a login belongs into variables of its own, such as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or PREFECT_API_AUTH_STRING."
        )


def _value(key: str, value: Any, path: Path, place: str, named: bool) -> str:
    variable = variables_of(key)[-1]
    if key in _SECRETS:
        raise ValueError(
            f"{place}: {key} is a secret, which does not belong in this file. Set {variable} in the environment"
            f"{', or name a file that holds it by ray_auth_token_path' if key == 'ray_auth_token' else ''}."
        )
    if key not in KEYS:
        raise ValueError(f"{place}: {key!r} is no setting; {known_names_text(key, KEYS)}")
    if key in _CHOOSE_CODE and not named:
        raise ValueError(
            f"{place}: {key} decides which code runs, so a file that was found and not named may not set it: it may have been "
            f"downloaded. Set {variable}, or VITLINE_CONFIG={path}."
        )
    if key == "recipe_packages" and isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{place}: {key} is {value!r}, but must be a text in quotes.")
    refuse_login(f"{place}: {key}", value)
    if key in _PATHS and "://" not in value and not value.startswith(("~", "$", "'", '"')):
        value = str(path.parent.absolute() / value)
    return checked(key, f"{place}: {key}", value)


def _place(path: Path, text: str, key: str) -> str:
    """`path, line 3`: where a key stands; without a line where it is not written plainly."""
    lines = enumerate(text.splitlines(), start=1)
    found = next((number for number, line in lines if re.match(rf"\s*\[?[\"']?{re.escape(key)}\b", line)), None)
    return f"{path}, line {found}" if found else str(path)
