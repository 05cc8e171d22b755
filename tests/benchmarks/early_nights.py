"""A series of real small nights on six tasks that are decided early: what each says, after which tasks, and what it costs.

`python -m tests.benchmarks.early_nights` takes about 40 minutes. The nights are those of the deployment's schedule, on own servers. The
first three have all their scores, with three seeds each, which makes the noise known. Of those that follow one has a worse recipe, and
one is started again by a person for its other scores.
"""

from collections.abc import Callable
from typing import Any

from sklearn.datasets import load_digits

from vitline.flows.catalog.records import read_pipeline
from vitline.infra.settings import changed_environment

from ..servers.own_servers import AWAY, own_servers
from .week_of_nights import FORM, OVERRIDES, PER_CLASS, Week, temporary

TASKS: dict[str, Callable[[int], int]] = {
    "parity": lambda digit: digit % 2,
    "thirds": lambda digit: digit % 3,
    "halves": lambda digit: digit // 5,
    "loops": lambda digit: int(digit in (0, 6, 8, 9)),
    "fifths": lambda digit: digit % 5,
}
"""Tasks of all digits, by name: the class of a digit."""
NIGHTS: dict[str, Any] = {
    "tasks": ["digits-5-to-9", *TASKS],
    "recipe.total_steps": 200,
    "recipe.optim.warmup_steps": 20,
    "nights.num_seeds": 3,
    "nights.ingest": False,
    "nights.promote": False,
    "nights.early_verdict": True,
}
WORSE = {"recipe.total_steps": 8, "recipe.optim.warmup_steps": 2}


class EarlyNights(Week):
    """Nights that say what they were decided after."""

    def prepare(self) -> None:
        super().prepare()
        images, labels = load_digits(return_X_y=True)
        for name, class_of in TASKS.items():
            folder = self.pictures.parent / name
            for i, (image, digit) in enumerate(zip(images, labels.tolist(), strict=True)):
                (folder / str(class_of(digit))).mkdir(parents=True, exist_ok=True)
                self.save(image, f"../{name}/{class_of(digit)}/{i:04d}.png")
            request = {"source": str(folder), "name": name, "val_fraction": 0.1, "test_fraction": 0.3}
            assert self.servers.ended(self.servers.start("prepare-corpus/default", request)).startswith("Completed")

    def night_of(self, what: str, **changes: Any) -> None:
        self.night(what, **NIGHTS | changes)
        self.say_look()

    def say_look(self) -> None:
        record = read_pipeline(self.store, str(self.last_night().pipeline))
        seconds = {
            stage: sum(row.wall_s for row in record.stages if row.stage == stage) for stage in ("pretrain", "evaluate")
        }
        look = f"{record.look.scored}, at level {record.look.level:.4f}" if record.look else "all scores at once"
        print(f"  {look}; pre-training {seconds['pretrain']:.0f} s, evaluation {seconds['evaluate']:.0f} s", flush=True)

    def again(self) -> None:
        """The last night once more, by a person, for its other scores."""
        at = self.last_due[:16]
        changes = {**NIGHTS, "nights.night": at, "nights.early_verdict": False}
        form = FORM | {name: value for name, value in changes.items() if "." not in name}
        request = form | {"overrides": OVERRIDES | {name: value for name, value in changes.items() if "." in name}}
        ended = self.servers.ended(self.servers.start("pretrain-then-transfer/nightly", request))
        print(f"\nthe same night again, for its other scores\n  {ended}", flush=True)
        self.say_look()


def run_nights(nights: EarlyNights) -> None:
    nights.add_pictures(0, PER_CLASS)
    nights.prepare()
    nights.switch_on()
    nights.night_of("the first night")
    nights.promote(nights.last_due[:10], "the first champion")
    for number in range(2, 8):
        nights.night_of(f"night {number}, the same recipe", seed=10 * number)
    nights.again()
    nights.night_of("a planted bug: training ends after 8 steps", seed=80, **WORSE)
    nights.night_of("the bug is mended", seed=90)


def main() -> None:
    with temporary() as folder, own_servers(None) as servers, changed_environment(**servers.env):
        run_nights(EarlyNights(servers, folder))
        print("\ntracebacks in the logs of the servers:", *servers.new_tracebacks(AWAY), sep="\n  ")


if __name__ == "__main__":
    main()
