"""What checks shapes and types of `vit` while tests run (`--jaxtyping-packages` in pyproject.toml)."""

from beartype import BeartypeConf, beartype

# An int is a float and a complex number to numpy and to Python's type checkers.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
