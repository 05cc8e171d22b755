"""Student's t distribution for whole degrees of freedom, by the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""

import math
from functools import lru_cache

_MOST_DF = 1_000
"""More degrees of freedom make no difference in the third digit."""


def two_sided_p(t: float, df: int) -> float:
    """The probability that |T| is at least |t|, for `df` >= 1 degrees of freedom."""
    df = min(df, _MOST_DF)
    angle = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    if df % 2:
        term, total = cosine, (cosine if df > 1 else 0.0)
        for i in range(2, df - 1, 2):
            term *= cosine**2 * i / (i + 1)
            total += term
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 1.0
        for i in range(1, df - 2, 2):
            term *= cosine**2 * i / (i + 1)
            total += term
        inside = sine * total
    return min(max(1 - inside, 0.0), 1.0)


@lru_cache(maxsize=4096)
def quantile(p: float, df: int) -> float:
    """The t with `two_sided_p(t, df) == p`, by bisection. `p`: more than 0, less than 1."""
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > p else (low, middle)
    return high
