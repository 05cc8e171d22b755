"""`vitline data views`: a page of what a training sees of its corpus."""

from pathlib import Path

from data_prep.shard_format import load_manifest
from flows import console
from infra.storage import open_store
from vit.config import TrainConfig
from vit.inspection.views import collect_views, views_html


def write_views(
    config: TrainConfig, recipe_name: str, out: Path, *, examples: int, views: int, mixed: int, as_json: bool
) -> None:
    """Writes the page and prints where it is. Raises ValueError if the folder of `out` does not exist."""
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"--out {str(out)!r} is not a file in an existing folder. Name one, such as views.html.")
    store = open_store(config.corpus)
    manifest = load_manifest(store)
    with console.progress(f"drawing views of {manifest.name}"):
        found = collect_views(store, manifest, config.split, config.recipe, examples=examples, views=views, mixed=mixed)
        lead = (
            f"Corpus {manifest.name}/{manifest.version}, split {config.split}; recipe {recipe_name}, "
            f"seed {config.recipe.seed}, batches of {config.recipe.input.global_batch_size:,}."
        )
        page = views_html(found, config.recipe, title=f"Training views of {manifest.name}", lead=lead)
        out.write_text(page, encoding="utf-8")
    if as_json:
        console.emit({"page": str(out), "examples": len(found.examples), "mixed": len(found.mixed)})
    else:
        console.print_result(f"wrote {out}")
