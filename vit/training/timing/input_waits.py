"""How much of its time a training waits for data, and for what, in one line."""

from collections.abc import Mapping

NOTED_FRACTION = 0.1
"""Share of the time from which on the waits are worth a line."""
_REASONS = {
    "time/store_wait_fraction": "the store is slow",
    "time/decode_wait_fraction": "decoding is slow",
    "time/hand_over_wait_fraction": "the hand-over of batches is slow",
}


def wait_fractions(data_wait_s: float, store_s: float, decode_s: float, elapsed_s: float) -> dict[str, float]:
    """The metrics: shares of the time that were waited for data, in all and by what was waited for; the parts add up."""
    store_s, decode_s = min(store_s, data_wait_s), min(decode_s, data_wait_s)
    seconds = (store_s, decode_s, max(0.0, data_wait_s - store_s - decode_s))
    parts = {name: part / elapsed_s for name, part in zip(_REASONS, seconds, strict=True)}
    return {"time/data_wait_fraction": data_wait_s / elapsed_s} | parts


def wait_reason(metrics: Mapping[str, float]) -> str:
    """`waits 43 % of the time for data: decoding is slow`; empty where it is little, or nothing is known."""
    fraction = metrics.get("time/data_wait_fraction", 0.0)
    if fraction < NOTED_FRACTION:
        return ""
    main = max(_REASONS, key=lambda name: metrics.get(name, 0.0))
    return f"waits {100 * fraction:.0f} % of the time for data: {_REASONS[main]}"
