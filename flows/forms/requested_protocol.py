"""The protocol that a form names, changed by its overrides, or a refusal in one sentence (ValueError)."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vitline.flows.forms.overrides import named_by, refuse_form_fields
from vitline.flows.forms.refusals import changes_below, refused
from vitline.infra.config import digest_of, replace
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import LargerTask, Protocol


def requested_protocol(name: str, overrides: Mapping[str, Any], from_scratch: bool) -> Protocol | Probe:
    """A protocol, or the user-defined one that the override `protocol` names, changed by the overrides that begin with `protocol.`; all
    other overrides are refused."""
    protocol = protocol_of(named_by("protocol", name, overrides))
    if from_scratch and isinstance(protocol, Probe):
        raise ValueError(
            f"Protocol {name} trains no network, so there is none to train from scratch: set from_scratch to false."
        )
    if others := [path for path in overrides if path.partition(".")[0] != "protocol"]:
        raise ValueError(f"{others[0]!r} cannot be overridden in an evaluation: overrides begin with 'protocol.'.")
    refuse_form_fields({"protocol.name", "protocol.kind"} & overrides.keys())
    changes = changes_below("protocol.", overrides, type(protocol).model_fields.keys() - {"name", "kind"})
    if not changes:
        return protocol
    # A changed protocol gets a name of its own, so that its scores cannot be taken for those of the named protocol.
    changed_name = f"{protocol.name}-{digest_of(changes)[:6]}"
    if isinstance(protocol, Protocol) and "larger" not in changes:
        # The settings for larger tasks repeat some of these fields; the changes apply to them, too.
        shared = {field: value for field, value in changes.items() if field in LargerTask.model_fields}
        changes["larger"] = [task.model_dump() | shared for task in protocol.larger]
    try:
        return replace(protocol, name=changed_name, **changes)
    except ValidationError as error:
        raise refused(error, "protocol") from error
