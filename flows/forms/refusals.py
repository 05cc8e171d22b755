"""Validation errors of a form or config as sentences: field, expectation, value."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from vitline.flows.forms.forms import NAME_PATTERNS
from vitline.infra.names import did_you_mean, known_names_text
from vitline.vit.models.config import field_path
from vitline.vit.models.user_code import REFERENCE

WORDS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": 'must be an object of names and values, as in {{"recipe.seed": 1}}',
    "model_type": "must be an object of fields and values",
    "literal_error": "must be {expected}",
    "missing": "must be given",
}
"""Expectations by pydantic's type of the error."""
PATTERNS = NAME_PATTERNS | {REFERENCE: "PACKAGE.MODULE:NAME"}
"""Expectations by the pattern of a text."""


def settable_path(loc: Sequence[str | int]) -> str:
    """The dotted path of a field in a validation error, as `--set` takes it: without the kind of a source."""
    return field_path([part for i, part in enumerate(loc) if not (i == 1 and loc[0] == "source")])


def problem_text(problem: Mapping[str, Any], fields: Iterable[str] = ()) -> str:
    """A validation error of a pydantic model as a sentence without a full stop: field, expectation, value. `fields` are those
    of the outermost model, to suggest one for an unknown name."""
    where, given = settable_path(problem["loc"]), problem.get("input")
    if problem["type"] == "extra_forbidden":
        text = "there is no such field"
        return f"{where}: {text}" + (
            f"; {known_names_text(where, fields)}" if fields and len(problem["loc"]) == 1 else ""
        )
    text = expectation(problem)
    if not isinstance(given, Mapping):
        text += f", not {given!r}"
    return f"{where}: {text}" if where else text


def changes_below(prefix: str, overrides: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The overrides that begin with `prefix`, without it. Raises ValueError for one that names none of the fields."""
    changes = {path.removeprefix(prefix): value for path, value in overrides.items() if path.startswith(prefix)}
    if unknown := next((path for path in changes if path.partition(".")[0] not in fields), None):
        hint = did_you_mean(f"{prefix}{unknown}", [f"{prefix}{field}" for field in fields])
        raise ValueError(f"There is no field '{prefix}{unknown}'; available fields: {', '.join(sorted(fields))}.{hint}")
    return changes


def refused(error: ValidationError, where: str) -> ValueError:
    """The refusal of a part of a form: `where` is the name of the part."""
    problems = [{**problem, "loc": (where, *problem["loc"]) if problem["loc"] else ()} for problem in error.errors()]
    return ValueError("; ".join(map(problem_text, problems)) + ".")


def expectation(problem: Mapping[str, Any]) -> str:
    """The expectation of the violated rule, in words."""
    context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in problem.get("ctx", {}).items()}
    if context.get("min_length") == 1:
        return "must not be left empty"
    if problem["type"] == "string_pattern_mismatch" and context["pattern"] in PATTERNS:
        return f"must be {PATTERNS[context['pattern']]}"
    if problem["type"] in WORDS:
        return WORDS[problem["type"]].format(**context)
    return str(problem["msg"]).removeprefix("Value error, ").rstrip(".")
