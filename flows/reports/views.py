"""`vitline data preview`: a page of what a training sees of its corpus."""

from pathlib import Path

from vitline.flows import console
from vitline.vit.pages.views import collect_views, views_html
from vitline.vit.run.resolved import ResolvedTraining


def write_views(
    training: ResolvedTraining, recipe_name: str, out: Path, *, examples: int, views: int, mixed: int, as_json: bool
) -> None:
    """Writes the page and prints where it is. Raises ValueError if the folder of `out` does not exist."""
    if not out.parent.is_dir() or out.is_dir():
        raise ValueError(f"--out {str(out)!r} is not a file in an existing folder. Name one, such as preview.html.")
    config, corpora = training.config, training.corpora
    names = " and ".join(part.title for part in corpora.parts)
    versions = " and ".join(f"{part.manifest.name}/{part.manifest.version}" for part in corpora.parts)
    with console.progress(f"drawing views of {names}"):
        found = collect_views(corpora, config.split, config.recipe, examples=examples, views=views, mixed=mixed)
        lead = (
            f"Corpus {versions}, split {config.split}; recipe {recipe_name}, "
            f"seed {config.recipe.seed}, batches of {config.recipe.input.global_batch_size:,}."
        )
        page = views_html(found, config.recipe, title=f"Training views of {names}", lead=lead)
        out.write_text(page, encoding="utf-8")
    if as_json:
        console.emit({"page": str(out), "examples": len(found.examples), "mixed": len(found.mixed)})
    else:
        console.print_result(f"wrote {out}")
