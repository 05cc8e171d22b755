"""Which decoder makes training views on this machine. Imports no torch."""

from importlib.util import find_spec

HOW_TO_GET_IT = (
    "`make install` builds it where a C compiler and the headers of libjpeg-turbo are found (vit/native/README.md)"
)


def native_is_installed() -> bool:
    """Whether the extension is installed. A training also compares its pixels, on first use (`native_decoder`)."""
    return find_spec("vitline_native") is not None
