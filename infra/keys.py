"""Run keys: a pure function of everything that results depend on, so that the same request finds the same run.

A digest is the sha256 of canonical JSON. The config digest of a training covers `recipe` alone. Its inputs are the digests of corpus,
decode policy and initial model, the names of the splits and, of a branch, run key and step of the parent's checkpoint. Commits and
package versions are recorded (`provenance.py`) and are in no key. Corpus versions, trials, scores and features have keys of the same kind.
"""

import re
from collections.abc import Mapping
from datetime import datetime

from vitline.infra.config import digest_of
from vitline.infra.night import night_name

RESULT_VERSIONS = {"prepare": 4, "pretrain": 1, "finetune": 1, "evaluate": 1, "predict": 1, "pipeline": 1}
"""One integer per stage, part of every run key. Raise one by hand when a change of the code changes results: older runs then keep
their keys, and the same request starts a new run."""


def run_key(name: str, stage: str, config_digest: str, inputs: Mapping[str, str], night: datetime | None = None) -> str:
    """`<name>-<12 hex>`: the digest covers stage, result version, config, inputs and night.

    `inputs` maps each input to its digest, such as {"corpus": manifest.digest}. `night` is the moment of a scheduled
    start, so that each night is a run of its own. The key is used as a folder name, in Ray job ids and in links, so
    names other than lower-case letters, digits, `.`, `_`, `-` raise ValueError, and so does an unknown stage.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,79}", name):
        raise ValueError(
            f"{name!r} cannot name a run. Use up to 80 characters of a-z, 0-9, '.', '_' and '-', such as 'vit-b16-i21k'."
        )
    if stage not in RESULT_VERSIONS:
        raise ValueError(f"{stage!r} is not a stage. infra/keys.py lists {', '.join(RESULT_VERSIONS)}.")
    identity = {
        "stage": stage,
        "semantics": RESULT_VERSIONS[stage],
        "config_digest": config_digest,
        "inputs": inputs,
        "night": night and night_name(night),
    }
    return f"{name}-{digest_of(identity)[:12]}"
