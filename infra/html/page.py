"""Renders HTML pages from Jinja2 templates. Each page is one file without scripts and external resources."""

import base64
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitline.infra.html.tables import numeric
from vitline.infra.html.text import duration, num_bytes
from vitline.infra.plain_text import visible_lines

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """Renders a template, which is named by its path from the parent folder of `infra`.

    Every value is escaped, because names in corpora may contain markup, and invisible characters are shown as in
    Python. A missing value raises `jinja2.UndefinedError`.
    """
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # imported only when a page is rendered

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[2]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    environment.filters |= {
        "bytes": num_bytes,
        "duration": duration,
        "right": numeric,
        "thousands": "{:,}".format,
    }
    return environment


def _shown(value: Any) -> Any:
    """A value as it is printed into a page; what a macro or another template has made is a page already."""
    return visible_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def data_uri(file: bytes, kind: str = "PNG") -> str:
    """An image file as a URI that a page can show."""
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file).decode()}"
