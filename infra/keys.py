"""Names of runs: a pure function of what their numbers depend on, so that the same request finds the same run."""

import re
from collections.abc import Mapping
from datetime import date

from infra.config import digest_of
from infra.result_versions import RESULT_VERSIONS


def run_key(name: str, stage: str, config_digest: str, inputs: Mapping[str, str], night: date | None = None) -> str:
    """`<name>-<12 hex>` (DESIGN 3.3): the digest covers stage, its semantics, config, input digests and night.

    `inputs` maps what goes in to its digest, such as {"corpus": manifest.digest}; `night` is the UTC date of a
    scheduled start, which makes each night a run of its own. The key names a folder, a Ray job and links, so
    ValueError is raised for a name other than lower-case letters, digits, `.`, `_`, `-`, and for an unknown stage.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,79}", name):
        raise ValueError(
            f"{name!r} cannot name a run; use up to 80 of a-z, 0-9, '.', '_' and '-', as in 'vit-b16-i21k'."
        )
    if stage not in RESULT_VERSIONS:
        raise ValueError(f"{stage!r} is no stage; infra/result_versions.py lists {', '.join(RESULT_VERSIONS)}.")
    identity = {
        "stage": stage,
        "semantics": RESULT_VERSIONS[stage],
        "config_digest": config_digest,
        "inputs": inputs,
        "night": night and night.isoformat(),
    }
    return f"{name}-{digest_of(identity)[:12]}"
