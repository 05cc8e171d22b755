"""User-defined protocols: a Python function that returns a Protocol, or a YAML file that changes one of vitline's.

A protocol is only where settings come from: jobs and records hold all of them. Its name begins with `own-` and ends in six digits of
the digest of its content, so that its scores are taken neither for those of a protocol of vitline nor for those of another content.
"""

import re
from collections.abc import Mapping
from typing import Any

from vitline.infra.config import digest_of, flatten, replace
from vitline.infra.names import did_you_mean
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol, known_protocols, protocol_named
from vitline.vit.models.user_code import kind_of, source_of
from vitline.vit.recipes.own import flaw_of_file, made_by, title_of
from vitline.vit.recipes.yaml_file import read_yaml

_PREFIX = "own-"
_NAME = r"[a-z0-9][a-z0-9-]{0,39}"
_GROUPS = ("augment", "optim")
"""Fields that are configs: a file lists of them, too, what differs."""


def protocol_of(reference: str) -> Protocol | Probe:
    """The protocol of a name, or a user-defined one: PACKAGE.MODULE:FUNCTION, or the path or URI of a YAML file. Raises ValueError."""
    kind = kind_of(reference)
    if kind is None and set(reference) & set("./:"):
        raise ValueError(
            f"There is no protocol {reference!r}. One of your own is PACKAGE.MODULE:FUNCTION, or a file that ends in .yaml."
        )
    if kind is None:
        return protocol_named(reference)
    protocol = _of_function(reference) if kind == "function" else _of_file(reference)
    _check(reference, protocol)
    if source := source_of(protocol.optim.optimizer, "optimizer"):
        protocol = replace(protocol, **{"optim.optimizer_source": source})
    return replace(protocol, name=f"{_PREFIX}{protocol.name}-{digest_of(protocol)[:6]}")


def is_user_defined(name: str) -> bool:
    """Whether a stored protocol of this name is user-defined."""
    return name.startswith(_PREFIX)


def _of_function(reference: str) -> Protocol:
    made = made_by(reference, "protocol")
    if not isinstance(made, Protocol):
        raise ValueError(
            f"The protocol {reference!r} returned {type(made).__name__}. It must return a Protocol of vitline.vit.evaluation.protocols."
        )
    return made


def _of_file(reference: str) -> Protocol:
    """The protocol of a file by its keys: `base`, the name of a protocol to start from; `protocol`, what differs from it."""
    tree, known = read_yaml(reference, "protocol", ("base", "protocol")).tree, known_protocols()
    named, given = tree.get("base"), tree.get("protocol", {})
    if not isinstance(named, str) or not isinstance(base := known.get(named), Protocol):
        fine_tuning = [name for name, each in known.items() if isinstance(each, Protocol)]
        raise ValueError(
            f"{reference} starts from base={named!r}, which is no fine-tuning protocol; available: {', '.join(fine_tuning)}."
            f"{did_you_mean(str(named), fine_tuning)}"
        )
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{reference}: protocol={given!r:.100} must be a mapping of fields, such as `total_steps: 2000`."
        )
    groups = {name: given[name] for name in _GROUPS if isinstance(given.get(name), Mapping)}
    fields: dict[str, Any] = {f"{name}": value for name, value in given.items() if name not in groups}
    title = {"name": title_of(reference), "seed_statistic": "mean"}
    try:
        return replace(base, **title | fields | flatten(groups))
    except ValueError as error:
        raise ValueError(f"{reference}: {flaw_of_file(error)}.") from error


def _check(reference: str, protocol: Protocol) -> None:
    """Refuses what names of scores, and reports that know a protocol by its name, could not tell apart."""
    if protocol.name in known_protocols():
        raise ValueError(f"{reference}: name={protocol.name!r} is a protocol of vitline. Give yours another `name`.")
    if not re.fullmatch(_NAME, protocol.name):
        raise ValueError(
            f"{reference}: name={protocol.name!r} must be up to 40 lower case letters, digits and '-', a letter or digit first."
        )
    if protocol.seed_statistic != "mean":
        raise ValueError(
            f"{reference}: seed_statistic={protocol.seed_statistic!r} must be 'mean', as which reports combine the seeds of user-defined "
            "protocols."
        )
