"""A deployments file: which deployments a project has, in YAML. Read and checked as a whole before anything is registered."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from vitline.flows.forms.forms import FORMS, Name
from vitline.flows.forms.nights import night_settings
from vitline.flows.forms.refusals import problem_text
from vitline.flows.on_prefect.deploy.schedules import cron_of
from vitline.flows.on_prefect.deployments import FUNCTIONS, PIPELINE, Deployment, Schedule
from vitline.flows.on_prefect.flow_run import read_request
from vitline.flows.on_prefect.prefect_private import start_dates
from vitline.flows.on_prefect.request_checks import check_request
from vitline.infra.config import FrozenConfig
from vitline.infra.names import known_names_text
from vitline.infra.settings import Settings, variables_of
from vitline.vit.recipes.yaml_file import YamlFile, read_yaml

Text = Annotated[str, Field(min_length=1, max_length=500)]
_YEARS = timedelta(days=9 * 366)
"""In which every date that exists comes: 29 February has a gap of eight years."""


class Defaults(FrozenConfig):
    """What all deployments of a file have unless they say otherwise."""

    pool: Text | None = None
    """Work pool. None: as it is registered; for a new one, as the others."""
    job_variables: dict[str, JsonValue] = Field(default={})
    """Variables of the pool's jobs. Those of a deployment are added, or replace the ones of the same name."""
    tags: tuple[Text, ...] = ()
    """Added to the tags of vitline, and those of a deployment to these."""


class Entry(Defaults):
    """One deployment."""

    name: Name
    flow: str
    schedules: tuple[Schedule, ...] = ()
    concurrency: int | None = Field(None, ge=1)
    """So many of its runs at once; further ones wait, those of reconcile and collect-garbage are cancelled."""
    description: str = Field("", max_length=2000)
    """Its purpose, shown above the help of the form."""
    request: dict[str, JsonValue] = Field(default={})
    """Fields of the form."""


class DeploymentsFile(FrozenConfig):
    """The deployments of one project."""

    project: str | None = None
    """The project that it is for. It must be that of VITLINE_PROJECT, which flows and commands use."""
    defaults: Defaults = Defaults()
    deployments: tuple[Entry, ...] = Field(min_length=1)


def read_deployments(path: str, settings: Settings) -> tuple[Deployment, ...]:
    """The deployments of a file at a path or URI. Raises ValueError with a line for each thing to correct: its place, what is wrong,
    and what is right."""
    file = read_yaml(path, "deployments file", DeploymentsFile.model_fields)
    try:
        content = DeploymentsFile.model_validate(file.tree)
    except ValidationError as error:
        raise ValueError("\n".join(_problem(file, problem) for problem in error.errors())) from error
    if refused := [*_project_refusals(file, content, settings)] or [*_refusals(file, content, settings)]:
        raise ValueError("\n".join(refused))
    return tuple(_deployment(file, content, index) for index in range(len(content.deployments)))


def _deployment(file: YamlFile, content: DeploymentsFile, index: int) -> Deployment:
    entry, defaults = content.deployments[index], content.defaults
    function, stage = FUNCTIONS[entry.flow]
    return Deployment(
        function,
        entry.name,
        entry.request,
        stage,
        entry.schedules,
        entry.concurrency,
        entry.description,
        entry.pool or defaults.pool,
        {**defaults.job_variables, **entry.job_variables},
        (*defaults.tags, *entry.tags),
        _place(file, index),
    )


def _place(file: YamlFile, index: int, *path: str | int) -> str:
    """`deployments.yaml (line 7), nightly-b16`"""
    return f"{file.place(('deployments', index, *path))}, {_called(file, index)}"


def _called(file: YamlFile, index: int) -> str:
    given = file.tree["deployments"][index]
    name = given.get("name") if isinstance(given, dict) else None
    return str(name) if name else f"deployment {index + 1}"


def _problem(file: YamlFile, problem: Any) -> str:
    """A field that is unknown, missing or of the wrong kind."""
    place, rest, fields = file.place(problem["loc"]), problem["loc"], DeploymentsFile.model_fields
    match problem["loc"]:
        case ("deployments", int(index), "schedules", int(nth), *rest):
            place, fields = f"{place}, {_called(file, index)}, schedule {nth + 1}", Schedule.model_fields
        case ("deployments", int(index), *rest):
            place, fields = f"{place}, {_called(file, index)}", Entry.model_fields
        case ("defaults", *rest):
            place, fields = f"{place}, defaults", Defaults.model_fields
    return f"{place}: {problem_text({**problem, 'loc': tuple(rest)}, fields)}."


def _project_refusals(file: YamlFile, content: DeploymentsFile, settings: Settings) -> Iterator[str]:
    # The file does not set the project: workers and commands would go on in another one.
    (variable,) = variables_of("project")
    if content.project not in (None, settings.project):
        yield (
            f"{file.place(['project'])}: the file is for the project {content.project!r}, but {variable} names {settings.project!r} here. "
            f"Set {variable}={content.project} here and for the workers, or correct the file."
        )


def _refusals(file: YamlFile, content: DeploymentsFile, settings: Settings) -> Iterator[str]:
    names, series = dict[tuple[str, str], str](), dict[str, str]()
    for index, entry in enumerate(content.deployments):
        if entry.flow not in FORMS:
            known = known_names_text(entry.flow, FORMS)
            yield f"{_place(file, index, 'flow')}: there is no flow {entry.flow!r}; {known}"
            continue
        if there := names.get((entry.flow, entry.name)):
            yield (
                f"{_place(file, index, 'name')}: {entry.flow}/{entry.name} is in {there} already. Give one of them another name."
            )
        names.setdefault((entry.flow, entry.name), file.place(("deployments", index)))
        for text, *path in [*_schedule_refusals(entry.schedules), *_request_refusals(entry, settings)]:
            yield f"{_place(file, index, *path)}: {text}"
        if entry.schedules and FUNCTIONS[entry.flow][0] == PIPELINE:
            name = str(entry.request.get("name", FORMS[entry.flow].model_fields["name"].default))
            if there := series.get(name):
                yield (
                    f"{_place(file, index, 'request', 'name')}: its nights would be of the same series {name!r} as those of {there}. "
                    f"Set `name: {entry.name}` in its request."
                )
            series.setdefault(name, _place(file, index))


def _schedule_refusals(schedules: Sequence[Schedule]) -> Iterator[tuple[str | int, ...]]:
    """What is wrong with the schedules of a deployment: a sentence, and the path to its place."""
    for nth, schedule in enumerate(schedules):
        at = ("schedules", nth)
        if schedule.name in (earlier.name for earlier in schedules[:nth]):
            yield (
                f"schedule {nth + 1} has the name {schedule.name!r} of another one. Give each of several schedules its `name`, by which it "
                "is found again when its times change.",
                *at,
            )
        try:
            times = cron_of(schedule)
        except ValidationError as error:
            (what, *_), value = error.errors()[0]["loc"], error.errors()[0]["input"]
            known = {
                "cron": "five fields such as 0 2 * * 1-5: minute, hour, day of the month, month, day of the week",
                "timezone": "an IANA time zone such as Europe/Berlin",
            }
            yield f"{what}: must be {known[str(what)]}, not {value!r}.", *at, str(what)
            continue
        if len(schedule.cron.split()) > 5:  # Prefect takes a sixth field for seconds
            yield f"cron: must have five fields, not {schedule.cron!r}.", *at, "cron"
            continue
        now = datetime.now(UTC)
        try:
            start_dates(times, now, now + _YEARS, 1)
        except ValueError:
            yield f"cron: must name a date that exists, not {schedule.cron!r}.", *at, "cron"


def _request_refusals(entry: Entry, settings: Settings) -> Iterator[tuple[str | int, ...]]:
    """Why the form refuses the request of a deployment: a sentence, and the path to its place. A deployment with neither request nor
    schedules is not checked, because its form is filled in on its page."""
    if not (entry.request or entry.schedules):
        return
    try:
        request = read_request(FORMS[entry.flow], entry.request, {})
        check_request(settings.root, entry.flow, request)
        if entry.schedules and night_settings(getattr(request, "overrides", {})).night is not None:
            yield (
                "nights.night is for runs that a person starts. Leave it out of a deployment with schedules.",
                "request",
            )
    except ValueError as error:
        yield f"request: {str(error).rstrip('.')}.", "request"
