"""The protocols as rows of a table. Imports none of the code that evaluates."""

from collections.abc import Callable

from vitline.flows.catalog.snapshot import RootSnapshot, StoredRun
from vitline.infra.records import UnreadableRecord, readable, reading
from vitline.infra.storage import open_store
from vitline.vit.evaluation.own import is_user_defined
from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import Protocol, known_protocols

COLUMNS = ["protocol", "splits", "image side", "settings", "pictures"]


def protocol_rows() -> list[dict[str, str]]:
    """One row per protocol of vitline: splits, resolution, settings and augmentation."""
    return [_row(protocol) for protocol in known_protocols().values()]


def user_protocol_rows(root: str, report: Callable[[UnreadableRecord], None]) -> list[dict[str, str]]:
    """One such row per user-defined protocol of the evaluations below a root, by name, with the newest of these evaluations as `from`.
    `report` gets the error of each run that cannot be read."""
    with RootSnapshot.read(open_store(root), ["run"]) as snapshot:
        for unreadable in snapshot.unreadable:
            report(unreadable.error)
        oldest_first = sorted(snapshot.runs.values(), key=lambda run: run.updated_at)
        used = [(run.key, found) for run, found in readable(oldest_first, _user_protocol, report) if found]
    newest = {protocol.name: {**_row(protocol), "from": key} for key, protocol in used}
    return [newest[name] for name in sorted(newest)]


def _user_protocol(run: StoredRun) -> tuple[StoredRun, Protocol | None]:
    """A run and the user-defined protocol that it evaluates by, if any. Raises UnreadableRecord."""
    with reading(run.store.uri_of("config.json")):
        config = run.config()
        if "protocol" in config and is_user_defined(config["protocol"]["name"]):
            return run, Protocol.model_validate(config["protocol"])
        return run, None


def _row(protocol: Protocol | Probe) -> dict[str, str]:
    if isinstance(protocol, Probe):
        shots = f", {' '.join(map(str, protocol.shots))} examples per class" if protocol.shots else ""
        cells = ["any", "the model's", f"{protocol.method}{shots}", "frozen features"]
    else:
        crop = protocol.augment
        pictures = f"crop {crop.train_crop}, flip {'on' if crop.flip else 'off'}"
        side = f"{protocol.image_size_px} px" if protocol.image_size_px else "the model's"
        rates = " ".join(f"{rate:g}" for rate in protocol.learning_rates)
        steps = " ".join(f"{n:,}" for n in protocol.total_steps)
        larger = "".join(f"; from {t.at_least:,} images {t.total_steps[0]:,} steps" for t in protocol.larger)
        cells = [protocol.splits, side, f"lr {rates}, {steps} steps{larger}", pictures]
    return dict(zip(COLUMNS, (protocol.name, *cells), strict=True))
