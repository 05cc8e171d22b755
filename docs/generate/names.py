"""The pages of names (recipes, protocols, networks, tasks, presets) and of environment variables."""

from vitline.data_prep.examples.presets import PRESETS
from vitline.flows.reports.protocol_rows import COLUMNS, protocol_rows
from vitline.infra.settings import KEYS, Settings, variables_of
from vitline.vit.evaluation.tasks import VTAB_TASKS
from vitline.vit.models.variants import REGISTERED, network_variant
from vitline.vit.recipes import RECIPES

from .markdown import joined, table, text


def names_page() -> str:
    """Recipes, protocols, networks, tasks and presets."""
    protocols = [
        [
            f"`{row['protocol']}`",
            *(text(str(row[column])) for column in COLUMNS[1:]),
        ]
        for row in protocol_rows()
    ]
    tasks = [[f"`{task.corpus_name}`", task.group, str(task.num_classes)] for task in VTAB_TASKS]
    presets = [[f"`{name}`", text(type(make().source).__doc__ or "")] for name, make in PRESETS.items()]
    networks = [[f"`{name}`", text(network_variant(name).summary)] for name in REGISTERED]
    return joined(
        [
            "# Recipes, protocols, networks, tasks",
            "## Recipes",
            table(["recipe", "what it is"], [[f"`{name}`", text(recipe.what)] for name, recipe in RECIPES.items()]),
            "## Protocols",
            table(COLUMNS, protocols),
            "## Networks",
            "`vitline model variants` adds parameters and FLOPs; `vitline model show NAME` shows one.",
            table(["variant", "network"], networks),
            "## Tasks of VTAB",
            table(["corpus", "group", "classes"], tasks),
            "## Presets",
            table(["preset", "source"], presets),
        ]
    )


def environment_page() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        names = ", ".join(f"`{variable}`" for variable in variables_of(name))
        rows.append([names, f"`{name}`" if name in KEYS else "-", text(field.description or "")])
    return joined(
        [
            "# Environment",
            "Variables that vitline reads. One that is empty counts as absent. Credentials of S3 are read by botocore "
            "(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_PROFILE`), in every process that needs "
            "them; vitline never passes them on.",
            "The key is that of [`vitline.toml`](../guides/settings.md#a-file-vitlinetoml).",
            table(["variable", "key", "what it is"], rows),
        ]
    )
