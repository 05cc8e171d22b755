"""`vitline.toml`, the file of settings. What it sets counts where neither a variable nor an option of a command says otherwise:

root = "s3://my-bucket/vitline"
mlflow_tracking_uri = "https://mlflow.example.org"
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from vitline.infra.names import known_names_text
from vitline.infra.settings import KEYS, SECRETS, Settings, checked, join_environment, refuse_login, variables_of

SETTINGS_FILE = "vitline.toml"
_CHOOSE_CODE = {"job_python", "recipe_packages"}
"""Not in a file that was only found, in the current folder or above it: it may have been downloaded with other files."""


def use_settings_file() -> None:
    """For entry points: sets the variables of `vitline.toml` for this process, its children, and the libraries that read them."""
    variables, source = file_variables()
    join_environment(variables, source=source)


def file_variables() -> tuple[dict[str, str], str]:
    """What `vitline.toml` sets, as variables for `join_environment`, and the path of the file. Raises ValueError for a wrong file."""
    named = Settings().config
    path = named or find_file(Path.cwd())
    if path is None:
        return {}, ""
    found = {variables_of(field): value for field, value in read_file(path, named=named is not None).items()}
    # Of several names of a setting, the libraries of stores read the last one.
    return {names[-1]: value for names, value in found.items() if not any(map(os.environ.get, names[:-1]))}, str(path)


def find_file(folder: Path) -> Path | None:
    """The file in `folder` or the nearest one above it, up to the repository or home folder. One of another user is named and left."""
    for place in (folder, *folder.parents):
        path = place / SETTINGS_FILE
        if os.path.isfile(path):  # False where the folder may not be read
            if path.stat().st_uid in (os.getuid(), 0):
                return path
            print(f"{path} is of another user and was not read; VITLINE_CONFIG={path} names it.", file=sys.stderr)
        if str(place) == os.path.expanduser("~") or os.path.exists(place / ".git"):
            break
    return None


def read_file(path: Path, *, named: bool) -> dict[str, str]:
    """The values of a file by setting, as variables have them; relative paths begin at the folder of the file.

    `named`: by VITLINE_CONFIG, instead of found. Raises ValueError with the line of what is wrong.
    """
    import tomllib  # here, as most commands find no file

    try:
        text = path.read_text()
        content = tomllib.loads(text)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}). Set VITLINE_CONFIG to a file of settings."
        ) from error
    except ValueError as error:  # of TOML, or of text that is not UTF-8
        raise ValueError(f"{path} is not TOML: {error}.") from error
    return {key: _value(key, value, path, _place(path, text, key), named) for key, value in content.items()}


def _value(key: str, value: Any, path: Path, place: str, named: bool) -> str:
    variable = variables_of(key)[-1]
    if key in SECRETS:
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
    if (
        key in ("root", "home", "ca", "ray_auth_token_path")
        and "://" not in value
        and not value.startswith(("~", "$", "'", '"'))
    ):
        value = str(path.parent.absolute() / value)
    return checked(key, f"{place}: {key}", value)


def _place(path: Path, text: str, key: str) -> str:
    """`path, line 3`: where a key stands; without a line where it is not written plainly."""
    lines = enumerate(text.splitlines(), start=1)
    found = next((number for number, line in lines if re.match(rf"\s*\[?[\"']?{re.escape(key)}\b", line)), None)
    return f"{path}, line {found}" if found else str(path)
