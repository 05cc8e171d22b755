"""What a training run is before it runs: its spec, its key, its progress. Imports no torch, so that flows are light."""

import json
from datetime import date
from typing import Any

from data_prep.shard_format import load_manifest
from infra.config import FrozenConfig, digest_of
from infra.keys import run_key
from infra.storage import Store, open_store
from vit.config import TrainConfig

# Times that Ray Train tries to place the worker group; together they last `queue_timeout_s`.
START_TRIES = 4


class RunSpec(FrozenConfig):
    """`config.json` of a run: its config and the digests it was keyed by."""

    schema_version: int = 1
    run_key: str
    """<name>-<12 hex>, see `make_spec`."""
    config: TrainConfig
    """The whole config."""
    inputs: dict[str, str]
    """Digests of the corpus and, where one is started from, the model."""
    models: str
    """URI of the folder that the finished model is published to."""
    night: date | None = None
    """UTC date of the scheduled start of a nightly run."""


def make_spec(config: TrainConfig, root: str, night: date | None = None) -> RunSpec:
    """The spec of a run, its key made from config, corpus and initial model. Raises FileNotFoundError if one is absent."""
    manifest = load_manifest(open_store(config.corpus))
    # Decoding is no part of a corpus's digest, yet other pixels are another run; so is another held-out score.
    inputs = {
        "corpus": manifest.digest,
        "split": config.split,
        "val_split": config.val_split or "",
        "decode": digest_of(manifest.decode_policy),
    }
    if config.init_model is not None:
        inputs["init_model"] = open_store(config.init_model).read_json("config.json")["digest"]
    key = run_key(config.name, config.stage, config.config_digest, inputs, night)
    return RunSpec(run_key=key, config=config, inputs=inputs, models=f"{root.rstrip('/')}/models", night=night)


def read_progress(run: Store) -> dict[str, Any] | None:
    """The latest `progress.json`, or None before the first report."""
    try:
        return json.loads(run.read("progress.json"))
    except FileNotFoundError:
        return None
