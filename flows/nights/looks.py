"""The looks of a night at its scores while it is evaluated: after which tasks it looks, and whether its verdict is certain then."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from vitline.flows.catalog.records import Look, PipelineRecord
from vitline.flows.forms.nights import NightSettings, night_settings
from vitline.flows.nights.early import costs_of, groups_of, is_certain, level_of
from vitline.flows.nights.from_records import OtherNights, earlier_nights, scores_of, verdict_of
from vitline.flows.nights.judge import FALSE_POSITIVE_RATE
from vitline.flows.nights.night_record import read_champion
from vitline.flows.nights.night_scores import NightScores
from vitline.infra.html.text import and_list
from vitline.infra.storage import Store
from vitline.vit.evaluation.evaluate import metric_name
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol

WHOLE_EVERY = timedelta(days=6, hours=12)
"""A night is evaluated as a whole where no other one was for so long: its scores tell the noise for the next ones."""


@dataclass(frozen=True)
class Looks:
    """The looks of one night."""

    groups: tuple[tuple[str, ...], ...]
    """The tasks, by the names of their corpora."""
    metrics: dict[str, str]
    """The metric of each task."""
    others: OtherNights
    reference: NightScores
    """An earlier night that has a score on every task."""
    nights: NightSettings

    @classmethod
    def planned(
        cls, root: Store, record: PipelineRecord, protocol: Protocol | Probe, tasks: Sequence[str]
    ) -> "Looks | None":
        """None where a night is evaluated as a whole: if that is requested or due, or if too little is known of earlier nights."""
        nights = night_settings(record.request.get("overrides", {}))
        if record.night is None or not nights.early_verdict:
            return None
        earlier, champion = earlier_nights(root, record.name, record.night), read_champion(root, record.name)
        whole = [each.night for each in earlier if each.night and not each.decided_early]
        if not whole or record.night - whole[-1] >= WHOLE_EVERY or (nights.promote and champion is None):
            return None
        metrics = {task: metric_name(protocol.name, task) for task in tasks}
        others = OtherNights.before(root, record, champion)
        complete = [
            one
            for one in (others.champion, others.last_night, *reversed(others.earlier))
            if one is not None and one.tasks.keys() >= {*metrics.values()}
        ]
        if not complete:
            return None
        by_metric = groups_of(complete[0], others.earlier, [*metrics.values()])
        task_of = {metric: task for task, metric in metrics.items()}
        groups = tuple(tuple(task_of[metric] for metric in group) for group in by_metric)
        if isinstance(protocol, Probe) and groups:  # the features that a probe needs take longer than its tasks
            groups = (tuple(tasks),)
        elif groups and (before := earlier[-1].look) and {*tasks} == {task for each in before.groups for task in each}:
            groups = before.groups  # both nights have scores on the same tasks then, however early they end
        looks = cls(groups, metrics, others, complete[0], nights)
        return looks if groups and looks.num > 1 else None

    @property
    def num(self) -> int:
        """After each group of the first seed, and after each other seed."""
        return len(self.groups) + self.nights.num_seeds - 1

    @property
    def text(self) -> str:
        """After which tasks the night looks at its scores, as a sentence."""
        after = [self.at(0, num + 1).scored for num in range(len(self.groups))]
        after += [self.at(nth, len(self.groups)).scored for nth in range(1, self.nights.num_seeds)]
        return f"the evaluation ends as soon as the verdict is certain; it looks after {and_list(after[:-1])}"

    def at(self, nth_seed: int, num_groups: int) -> Look:
        """The look after so many groups of a seed, counted from 0."""
        some = [self.metrics[task] for group in self.groups[:num_groups] for task in group]
        cost = costs_of(self.reference, [*self.metrics.values()])
        number = nth_seed + num_groups - 1
        return Look(
            groups=self.groups,
            num_tasks=len(some),
            num_seeds=nth_seed + 1,
            of_seeds=self.nights.num_seeds,
            cost_fraction=(nth_seed + sum(cost[name] for name in some)) / self.nights.num_seeds,
            level=level_of(number, self.num, FALSE_POSITIVE_RATE),
        )

    def is_certain(self, root: Store, record: PipelineRecord) -> bool:
        """Whether the rest of the evaluation of a record with a look could hardly change its verdict. A better night is evaluated as a
        whole where it may become the champion."""
        verdict, ours = verdict_of(root, record, self.others), scores_of(root, record, predictions=False)
        if ours is None or (verdict.word == "better" and self.nights.promote):
            return False
        references = {one.key: one for one in (self.others.champion, self.others.last_night) if one}
        return is_certain(
            verdict,
            ours,
            references,
            self.others.earlier,
            names=[*self.metrics.values()],
            num_seeds=self.nights.num_seeds,
            last_level=level_of(self.num - 1, self.num, FALSE_POSITIVE_RATE),
        )
