"""The protocols as rows of a table. Imports none of the code that evaluates."""

from vitline.vit.evaluation.probes import Probe
from vitline.vit.evaluation.protocols import known_protocols


def protocol_rows() -> list[dict[str, str]]:
    """One row per protocol: splits, resolution, settings and augmentation."""
    rows = []
    for protocol in known_protocols().values():
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
        rows.append(
            dict(
                zip(("protocol", "splits", "image side", "settings", "pictures"), (protocol.name, *cells), strict=True)
            )
        )
    return rows
