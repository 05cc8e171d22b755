"""A run that a test writes alone."""

from vitline.infra.runs.handle import Run


class Unleased(Run):
    """Needs no lease."""

    def check(self) -> None:
        pass
