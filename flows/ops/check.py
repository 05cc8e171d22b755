"""The result of one check of the doctor."""

from typing import NamedTuple


class Check(NamedTuple):
    """One result; `advice` says what to do about it and is empty if nothing is wrong."""

    name: str
    ok: bool
    found: str
    advice: str = ""

    @property
    def mark(self) -> str:
        return "ok" if self.ok else "FAIL"
