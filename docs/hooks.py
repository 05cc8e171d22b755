"""What MkDocs does beside its own work: adds the pages that are generated from the code, and files of the repository."""

from pathlib import Path

import generate
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages of the site that stand at the top of the repository, where people look for them.
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in generate.pages().items():
        files.append(File.generated(config, path, content=page))
    for name in TOP:
        files.append(File.generated(config, name.lower(), content=(ROOT / name).read_text()))
    return files
