"""The protocols that a form names, changed by its overrides, or a refusal in one sentence (ValueError)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from vitline.flows.forms.overrides import refuse_form_fields
from vitline.flows.forms.refusals import changes_below, refused
from vitline.infra.config import digest_of, replace
from vitline.infra.html.text import and_list
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import LargerTask, Protocol, protocol_named

PREFIX = "protocol."


def requested_protocols(
    names: Sequence[str], overrides: Mapping[str, Any], from_scratch: bool
) -> dict[str, Protocol | Probe]:
    """The protocols of a form by their names there, in its order. Overrides that are of none of them are refused."""
    prefixes = [f"{PREFIX}{name}." for name in names]
    for path in overrides:
        if not path.startswith(PREFIX):
            raise ValueError(f"{path!r} cannot be overridden in an evaluation: overrides begin with 'protocol.'.")
        if len(names) > 1 and not path.startswith(tuple(prefixes)):
            raise ValueError(f"{path!r} does not say which protocol it is of: begin it with {' or '.join(prefixes)}")
    protocols = {name: requested_protocol(name, overrides_of(name, names, overrides)) for name in names}
    if from_scratch and all(isinstance(protocol, Probe) for protocol in protocols.values()):
        one = len(names) == 1
        raise ValueError(
            f"Protocol{'s' * (not one)} {and_list(names)} train{'s' * one} no network, so there is none to train from scratch: set "
            "from_scratch to false."
        )
    return protocols


def overrides_of(name: str, names: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Those of one of the protocols `names`, as they are written where it is the only one: its name, which they have where there are
    several, is left out."""
    named = f"{PREFIX}{name}."
    own = [path for path in overrides if path.startswith(PREFIX if len(names) == 1 else named)]
    return {f"{PREFIX}{path.removeprefix(named).removeprefix(PREFIX)}": overrides[path] for path in own}


def as_for_one(request: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """A request, as JSON, as if it had asked for one of its protocols only: all that its scores depend on."""
    asked: str | Sequence[str] = request["protocol"]
    overrides: Mapping[str, Any] = request.get("overrides", {})
    kept = {path: value for path, value in overrides.items() if not path.startswith(PREFIX)}
    own = overrides_of(protocol, [asked] if isinstance(asked, str) else asked, overrides)
    return {**request, "protocol": protocol, "overrides": kept | own}


def requested_protocol(name: str, overrides: Mapping[str, Any]) -> Protocol | Probe:
    """A protocol, changed by overrides, which all begin with `protocol.`."""
    protocol = protocol_named(name)
    refuse_form_fields({"protocol.name", "protocol.kind"} & overrides.keys())
    changes = changes_below("protocol.", overrides, type(protocol).model_fields.keys() - {"name", "kind"})
    if not changes:
        return protocol
    # A changed protocol gets a name of its own, so that its scores cannot be taken for those of the named protocol.
    changed_name = f"{name}-{digest_of(changes)[:6]}"
    if isinstance(protocol, Protocol) and "larger" not in changes:
        # The settings for larger tasks repeat some of these fields; the changes apply to them, too.
        shared = {field: value for field, value in changes.items() if field in LargerTask.model_fields}
        changes["larger"] = [task.model_dump() | shared for task in protocol.larger]
    try:
        return replace(protocol, name=changed_name, **changes)
    except ValidationError as error:
        raise refused(error, "protocol") from error
