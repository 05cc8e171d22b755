"""The alerts as automations of Prefect: created once, then they belong to whoever uses Prefect.

`vitline flows deploy` creates each automation the first time only. Which ones it has created stands in a variable of Prefect, so one
that somebody has edited, paused or deleted stays as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.events.actions import DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.ops.server_http import flow_run_page
from vitline.infra.names import known_names_text
from vitline.infra.settings import Settings

RUN_TEXT = "{{ flow_run.name }} ({{ flow.name }}): {{ flow_run.state.message }}"
EVENT_TEXT = "{{ event.payload.text }}"


@dataclass(frozen=True)
class Alert:
    """An automation: the events that it waits for, and the text of its message, to which a link to the flow run is added."""

    what: str
    kinds: tuple[str, ...]
    """The kinds of events of this project, or the states of its flow runs."""
    description: str
    text: str = EVENT_TEXT
    of_flow_runs: bool = False
    """Whether the events are states of flow runs, of which only the project's count."""

    @property
    def name(self) -> str:
        return f"{Settings().project}: {self.what}"


ALERTS = (
    Alert("a run failed", ("Failed", "Crashed"), "A flow run of vitline failed, or its process is gone.",
          RUN_TEXT, of_flow_runs=True),
    Alert("a night is worse", ("Worse", "Broken"), "A night transfers worse than the champion or the night "
          "before, or it is broken.", RUN_TEXT, of_flow_runs=True),
    Alert("a better night was not promoted", ("gate-refused",), "The gate refused a night that is better than "
          "the champion; `vitline model promote` promotes it by hand."),
    Alert("a training makes no step", ("stalled",), "reconcile saw no progress of a training or preparation for "
          "`stalled_minutes` of its form."),
    Alert("a scheduled run did not start", ("not-started",), "An active schedule starts nothing, as when no "
          "worker is up."),
    Alert("the disk is nearly full", ("disk",), "Less than `min_free_gb` of reconcile's form is left on the "
          "machine where it runs."),
)  # fmt: skip


class CreatedAlerts(NamedTuple):
    """What a deployment has done to the alerts."""

    new: tuple[str, ...]
    """Names of the automations that it created."""
    given_action: tuple[str, ...] = ()
    """Those that were there without an action and now send to the block."""


def event_of(kind: str) -> str:
    """The name of an event of this project: several may use one Prefect."""
    return f"{Settings().project}.alert.{kind}"


def created_variable() -> str:
    """The variable of Prefect that holds the names of the automations that were created."""
    return f"{Settings().project.replace('-', '_')}_alerts"


def create_alerts(notify: str | None = None) -> CreatedAlerts:
    """Creates the automations that were never created at this server.

    `notify`: the notification block that they send to, as TYPE/NAME (`slack-webhook/vision-team`). Without one they send nothing
    until somebody adds an action in Prefect, or names a block here: those that do nothing so far get it. Raises ValueError for a block
    that does not exist, and where Prefect refuses to create automations.
    """
    try:
        with client() as api:
            return _create_alerts(api, None if notify is None else block_id(api, notify))
    except PrefectHTTPStatusError as error:
        answer = error.response
        raise ValueError(
            f"The deployments are registered, but Prefect refuses to create alerts (status {answer.status_code}: "
            f"{answer.text[:200]}). Automations need a Prefect 3 server, and in Prefect Cloud a key with the right to create them."
        ) from error


def _create_alerts(api: SyncPrefectClient, block: UUID | None) -> CreatedAlerts:
    created, project = created_variable(), Settings().project
    variable = api.read_variable_by_name(created)
    names = list(variable.value) if variable and isinstance(variable.value, list) else []
    given = [alert.name for alert in ALERTS if alert.name in names and block and _give_action(api, alert, block)]
    new = [alert for alert in ALERTS if alert.name not in names]
    for alert in new:
        api.create_automation(automation(alert, block))
        names.append(alert.name)
        if variable is None:
            variable = api.create_variable(VariableCreate(name=created, value=names, tags=[project]))
        else:
            api.update_variable(VariableUpdate(name=created, value=names))
    return CreatedAlerts(tuple(alert.name for alert in new), tuple(given))


def _give_action(api: SyncPrefectClient, alert: Alert, block: UUID) -> bool:
    """Lets an automation that does nothing send to the block. Everything else of it stays."""
    changed = False
    for found in api.read_automations_by_name(alert.name):
        if all(isinstance(action, DoNothing) for action in found.actions):
            # Prefect refuses an owner in an update.
            kept = {name: getattr(found, name) for name in AutomationCore.model_fields if name != "owner_resource"}
            api.update_automation(found.id, AutomationCore(**kept | {"actions": [action_of(alert, block)]}))
            changed = True
    return changed


def alert_lines(done: CreatedAlerts, notify: str | None) -> list[str]:
    """What was done, as lines of text."""
    lines = []
    if done.new:
        to = (
            f"sent to {notify}"
            if notify
            else "each waits for an action: in Prefect, Automations, or `vitline flows deploy --notify`"
        )
        lines.append(f"{_counted(done.new)} created: {_short(done.new)}; {to}")
    if done.given_action:
        lines.append(
            f"{_counted(done.given_action)} without an action now sent to {notify}: {_short(done.given_action)}"
        )
    if notify and not lines:
        lines.append(
            f"alerts stay as they are: each has an action already or was deleted, so none is sent to {notify} instead"
        )
    return lines


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} alert{'s' * (len(names) != 1)}"


def _short(names: Sequence[str]) -> str:
    return ", ".join(name.partition(": ")[2] for name in names)


def block_id(api: SyncPrefectClient, notify: str) -> UUID:
    kind, _, name = notify.partition("/")
    known = [
        f"{block.block_type.slug}/{block.name}" for block in api.read_block_documents(limit=200) if block.block_type
    ]
    try:
        return api.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        raise ValueError(
            f"Prefect has no block {notify!r}; {known_names_text(notify, known)} Its page Blocks creates one; a name is TYPE/NAME, "
            "as in slack-webhook/vision-team."
        ) from error


def automation(alert: Alert, block: UUID | None) -> AutomationCore:
    project, events, related = (
        Settings().project,
        {event_of(kind) for kind in alert.kinds},
        ResourceSpecification(root={}),
    )
    if alert.of_flow_runs:
        events = {f"prefect.flow-run.{state}" for state in alert.kinds}
        of_project = {"prefect.resource.id": f"prefect.tag.{project}", "prefect.resource.role": "tag"}
        related = ResourceSpecification.model_validate(of_project)
    trigger = EventTrigger(expect=events, match_related=related, for_each={"prefect.resource.id"}, threshold=1)
    return AutomationCore(
        name=alert.name,
        description=alert.description,
        trigger=trigger,
        actions=[action_of(alert, block) if block else DoNothing()],
        tags=[project],
    )


def action_of(alert: Alert, block: UUID) -> SendNotification:
    page = f" {flow_run_page(Settings(), '{{ flow_run.id }}')}" if alert.of_flow_runs else ""
    # Prefect's client leaves out of an update what was not given, the type included.
    return SendNotification(
        type="send-notification", block_document_id=block, subject=alert.name, body=alert.text + page
    )


def emit(kind: str, subject: str, text: str) -> None:
    """Sends an event to Prefect, for the automations to act on; its page *Event feed* shows it."""
    event: Mapping[str, object] = {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": event_of(kind),
        "resource": {"prefect.resource.id": f"{Settings().project}.{kind}.{subject}", "prefect.resource.name": subject},
        "payload": {"text": text},
    }
    with client() as api:
        api.request("POST", "/events", json=[event])
