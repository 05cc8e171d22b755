"""Pictures that JAX resizes as the original codes do: bilinear, without and with antialias.

    python tests/golden/make_resize_vectors.py    (needs jax; writes resize_vectors.json)

TensorFlow's `tf.image.resize` of these codes has the same sampling: half-pixel centres, edges repeated.
"""

import json
from pathlib import Path

import numpy as np

SIZES = [((7, 9), (3, 4)), ((7, 9), (16, 11)), ((40, 30), (24, 24)), ((5, 5), (1, 2))]


def picture(height: int, width: int) -> np.ndarray:
    """uint8 (height, width, 3), a function of the position alone."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return ((37 * y * y + 61 * x + 17 * x * y + 89 * c) % 256).astype(np.uint8)


def main() -> None:
    import jax

    cases = []
    for source, target in SIZES:
        for antialias in (False, True):
            image = picture(*source).astype(np.float32)
            resized = jax.image.resize(image, (*target, 3), method="linear", antialias=antialias)
            values = [round(float(value), 3) for value in np.asarray(resized).ravel()]
            cases.append({"from": source, "to": target, "antialias": antialias, "values": values})
    path = Path(__file__).with_name("resize_vectors.json")
    path.write_text(json.dumps({"jax": jax.__version__, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
