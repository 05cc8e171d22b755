"""The reference pages, generated from the code: commands, forms, config fields, metrics, names, environment, Python API.

`docs/hooks.py` calls `pages()` whenever MkDocs builds the site, so that a page is never older than the code.
"""

from .commands import commands_page
from .config_fields import fields_page, forms_page
from .metrics import differing_metrics, metrics_page
from .names import environment_page, names_page
from .python_api import python_page


def pages() -> dict[str, str]:
    """Markdown by its path below docs/."""
    if differing := differing_metrics():
        raise ValueError(
            f"METRICS in docs/generate/metrics.py and the code differ: {', '.join(differing)}. Correct METRICS."
        )
    made = {
        "commands": commands_page,
        "forms": forms_page,
        "fields": fields_page,
        "names": names_page,
        "metrics": metrics_page,
        "environment": environment_page,
        "python": python_page,
    }
    return {f"reference/{name}.md": page() for name, page in made.items()}
