"""What one check of the doctor finds."""

from typing import NamedTuple


class Check(NamedTuple):
    """One finding; `advice` says what to do about it, or is empty."""

    name: str
    ok: bool
    found: str
    advice: str = ""

    @property
    def mark(self) -> str:
        return "ok" if self.ok else "FAIL"
