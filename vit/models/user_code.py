"""User code by its import path: recipes, protocols, networks, losses and optimizers (docs/guides/own-recipes.md). Imports no torch."""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from vitline.infra.names import did_you_mean
from vitline.infra.settings import Settings

REFERENCE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""PACKAGE.MODULE:NAME"""


def is_reference(text: str) -> bool:
    """Whether a text is PACKAGE.MODULE:NAME."""
    return re.match(REFERENCE, text) is not None


def is_of_torch(reference: str, what: str) -> bool:
    """Whether a reference is an optimizer of torch, torch.optim:NAME."""
    return what == "optimizer" and reference.startswith("torch.optim:")


def is_user_code(text: str, what: str) -> bool:
    """Whether a text is PACKAGE.MODULE:NAME of other code than that of torch's optimizers."""
    return is_reference(text) and not is_of_torch(text, what)


def kind_of(reference: str) -> Literal["function", "file"] | None:
    """Whether a reference is PACKAGE.MODULE:FUNCTION or a YAML file; None for other texts, such as the name of a recipe."""
    if reference.endswith((".yaml", ".yml")):
        return "file"
    return "function" if is_reference(reference) else None


def package_of(reference: str) -> str:
    """The package of a PACKAGE.MODULE:NAME."""
    return re.split(r"[.:]", reference)[0]


def check_package(reference: str, packages: Collection[str], what: str = "recipe") -> None:
    """Raises ValueError for a reference into a package that is not among `packages`. To import a module is to run it, and who fills in
    a form, or publishes a model, may not choose what other machines run."""
    if (package := package_of(reference)) in packages:
        return
    if what in ("recipe", "protocol"):
        raise ValueError(
            f"The {what} {reference!r} is Python code of {package!r}, which forms may not import. Add the package to "
            "VITLINE_RECIPE_PACKAGES where flows run, or give a YAML file."
        )
    raise ValueError(
        f"The {what} {reference!r} is Python code of {package!r}, which may not be imported here. Add the package to "
        "VITLINE_RECIPE_PACKAGES where flows and jobs run, and where the model is used."
    )


def imported(reference: str, what: str) -> Any:
    """The function or class of a reference; the current folder is searched last. Raises ValueError for one that cannot be imported or
    called."""
    module_name, _, name = reference.partition(":")
    search_here()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"The module of the {what} {reference!r} cannot be imported: {type(error).__name__}: {error}. Install its package "
            "where this runs, or run the command in the folder of the module."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{module_name} has no function {name!r}.{did_you_mean(name, vars(module))}")
    return found


def check_allowed(reference: str, what: str) -> None:
    """Raises ValueError for a reference into a package that is not in VITLINE_RECIPE_PACKAGES. Torch's optimizers are allowed."""
    if not is_of_torch(reference, what):
        check_package(reference, Settings().recipe_packages, what)


def imported_where_allowed(reference: str, what: str) -> Any:
    """Like `imported`, for what `check_allowed` allows only."""
    check_allowed(reference, what)
    return imported(reference, what)


def search_here() -> None:
    """Lets imports search the current folder, last."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def source_digest(reference: str) -> str:
    """sha256 over all Python files of the package of a reference, by their paths in it. Nothing is imported.

    Raises ValueError for a package that is not found.
    """
    search_here()
    importlib.invalidate_caches()
    package = package_of(reference)
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.rglob("*.py")}
    if spec and not folders and spec.origin:
        files = {Path(spec.origin).name: Path(spec.origin)}
    if not files:
        raise ValueError(
            f"There is no Python package {package!r} here, of which {reference!r} is. Install it where this runs and where jobs run."
        )
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def check_source(reference: str, digest: str, what: str) -> None:
    """Raises ValueError where the code of a reference is not that of a digest."""
    if (found := source_digest(reference)) != digest:
        raise ValueError(
            f"The Python files of {package_of(reference)!r} are others ({found[:12]}) than those that the {what} {reference!r} was made "
            f"with ({digest[:12]}). Restore that version of the package here, or start a new run."
        )


def source_of(reference: str, what: str, known: str = "") -> str:
    """The digest of the code of a reference, which is the `known` one if there is one; empty for what is no user code.

    Raises ValueError for a package that may not be imported or is not found, and for code that has changed since.
    """
    if not is_user_code(reference, what):
        return ""
    check_allowed(reference, what)
    if known:
        check_source(reference, known, what)
    return known or source_digest(reference)


def user_code_error(used: Mapping[str, tuple[str, str]]) -> str:
    """Why user code cannot be used for a run that began with it: `used` has reference and digest by what it is, such as a loss. Names
    of vitline's own are no such code. Empty where all can be used."""
    try:
        for what, (reference, digest) in used.items():
            if is_user_code(reference, what):
                check_allowed(reference, what)
                check_source(reference, digest, what)
    except ValueError as problem:
        return str(problem)
    return ""
