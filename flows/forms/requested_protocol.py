"""The protocols that a form names, changed by its overrides, or a refusal in one sentence (ValueError)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from vitline.flows.forms.overrides import named_by, refuse_form_fields
from vitline.flows.forms.refusals import changes_below, refused
from vitline.flows.forms.user_code import optimizer_source
from vitline.infra.config import digest_of, replace
from vitline.infra.html.text import and_list
from vitline.vit.evaluation.own import protocol_of
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import LargerTask, Protocol

PREFIX = "protocol."


def requested_protocols(
    named: Sequence[str], overrides: Mapping[str, Any], from_scratch: bool
) -> dict[str, Protocol | Probe]:
    """The protocols of a form by their names, in its order: those of its field, or what the override `protocol` gives in their place.
    Each is changed by its overrides, which begin with `protocol.`; other overrides are refused."""
    given = {each.name: each for each in map(protocol_of, _named(named, overrides))}
    names, prefixes = [*given], [f"{PREFIX}{name}." for name in given]
    for path in overrides.keys() - {"protocol"}:
        if not path.startswith(PREFIX):
            raise ValueError(f"{path!r} cannot be overridden in an evaluation: overrides begin with 'protocol.'.")
        if len(names) > 1 and not path.startswith(tuple(prefixes)):
            raise ValueError(f"{path!r} does not say which protocol it is of: begin it with {' or '.join(prefixes)}")
    protocols = {name: _changed(each, overrides_of(name, names, overrides)) for name, each in given.items()}
    if from_scratch and all(isinstance(protocol, Probe) for protocol in protocols.values()):
        one = len(names) == 1
        raise ValueError(
            f"Protocol{'s' * (not one)} {and_list(names)} train{'s' * one} no network, so there is none to train from scratch: set "
            "from_scratch to false."
        )
    return protocols


def _named(named: Sequence[str], overrides: Mapping[str, Any]) -> Sequence[str]:
    """Names, files and functions of the protocols of a form."""
    own = overrides.get("protocol")
    if not isinstance(own, list):
        return named if own is None else [named_by("protocol", None, overrides)]
    if not own or not all(isinstance(each, str) for each in own) or len({*own}) < len(own):
        raise ValueError(
            f"The override protocol={own!r} must be a file, a function, or a list of these and of names of protocols, each once."
        )
    return own


def overrides_of(name: str, names: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Those of one of the protocols `names`, as they are written where it is the only one: its name, which they have where there are
    several, is left out."""
    named = f"{PREFIX}{name}."
    own = [path for path in overrides if path.startswith(PREFIX if len(names) == 1 else named)]
    return {f"{PREFIX}{path.removeprefix(named).removeprefix(PREFIX)}": overrides[path] for path in own}


def as_for_one(request: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """A request, as JSON, as if it had asked for one of its protocols only, by its name: all that its scores depend on."""
    overrides: Mapping[str, Any] = request.get("overrides", {})
    asked: str | Sequence[str] = overrides.get("protocol", request["protocol"])
    kept = {path: value for path, value in overrides.items() if path.partition(".")[0] != "protocol"}
    own = overrides_of(protocol, [asked] if isinstance(asked, str) else asked, overrides)
    return {**request, "protocol": protocol, "overrides": kept | own}


def _changed(protocol: Protocol | Probe, overrides: Mapping[str, Any]) -> Protocol | Probe:
    """A protocol, changed by overrides, which all begin with `protocol.`."""
    refuse_form_fields({"protocol.name", "protocol.kind"} & overrides.keys())
    changes = changes_below("protocol.", overrides, type(protocol).model_fields.keys() - {"name", "kind"})
    if not changes:
        return protocol
    given = dict(changes)
    if isinstance(protocol, Protocol) and "larger" not in changes:
        # The settings for larger tasks repeat some of these fields; the changes apply to them, too.
        shared = {field: value for field, value in changes.items() if field in LargerTask.model_fields}
        changes["larger"] = [task.model_dump() | shared for task in protocol.larger]
    try:
        changed = replace(protocol, **changes)
    except ValidationError as error:
        raise refused(error, "protocol") from error
    if isinstance(changed, Protocol):
        source = {f"optim.{name}": value for name, value in optimizer_source(changed.optim).items()}
        changed, given = replace(changed, **source), given | source
    # A changed protocol gets a name of its own, so that its scores cannot be taken for those of the named protocol.
    return replace(changed, name=f"{protocol.name}-{digest_of(given)[:6]}")
