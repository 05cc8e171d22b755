"""The type checker of shapes and types in `vit` while tests run (`--jaxtyping-packages` in pyproject.toml)."""

from beartype import BeartypeConf, beartype

# Accept an int as a float or complex number, as numpy and Python's type checkers do.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
