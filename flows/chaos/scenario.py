"""A scenario injects one fault into what it has made itself, and checks one promise. The docstring of its function is the promise."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitline.flows.chaos.bench import Bench
from vitline.flows.chaos.promises import NotTried, PromiseBroken

Verdict = Literal["kept", "broken", "not tried"]


class Result(NamedTuple):
    """What became of one promise."""

    name: str
    fault: str
    promise: str
    verdict: Verdict
    found: str
    """What was observed; for a promise that was not tried, the reason."""
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """One fault and one promise."""

    name: str
    fault: str
    needs: str
    about_s: int
    """Seconds that it takes on two cores with a local store."""
    body: Callable[[Bench], str]
    """Raises PromiseBroken or NotTried; any other error breaks the promise as well. Returns what was observed."""

    @property
    def promise(self) -> str:
        return " ".join((self.body.__doc__ or "").split())

    def run(self, bench: "Bench") -> Result:
        """Injects the fault and says what became of the promise. Never raises but for Ctrl-C."""
        began = time.monotonic()
        verdict: Verdict
        try:
            verdict, found = "kept", self.body(bench)
        except NotTried as reason:
            verdict, found = "not tried", str(reason)
        except PromiseBroken as broken:
            verdict, found = "broken", str(broken)
        except Exception as error:
            verdict, found = "broken", f"{type(error).__name__}: {error}"
        return Result(self.name, self.fault, self.promise, verdict, found, round(time.monotonic() - began, 1))


def scenario(fault: str, needs: str, about_s: int) -> Callable[[Callable[[Bench], str]], Scenario]:
    """Makes a scenario of a function, which gives it its name and its promise."""

    def made(body: Callable[[Bench], str]) -> Scenario:
        return Scenario(body.__name__.replace("_", "-"), fault, needs, about_s, body)

    return made
