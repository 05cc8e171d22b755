"""Damages JPEGs and asks the extension for views of them. As a program, it fuzzes an extension for some seconds; the test runs it
with the compiler's checks: python damage.py FOLDER_OF_THE_EXTENSION SECONDS
"""

import io
import random
import sys
import time

import numpy as np

HUGE = (0, 1, 0x7F, 0x80, 0xFF)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy of `data`, truncated, or with bits, bytes and ranges changed; headers more often than the rest. It may be empty."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not changed:
            break
        at = rng.randrange(min(len(changed), 700)) if rng.random() < 0.4 else rng.randrange(len(changed))
        kind = rng.choice(("cut", "bit", "byte", "two", "drop", "repeat"))
        if kind == "cut":
            del changed[max(at, 4) :]
        elif kind == "bit":
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            changed[at] = rng.choice((*HUGE, rng.randrange(256)))
        elif kind == "two":
            changed[at : at + 2] = bytes((0xFF, rng.choice((0xC0, 0xC2, 0xC4, 0xD0, 0xD8, 0xD9, 0xDA, 0xDD, 0x00))))
        elif kind == "drop":
            del changed[at : at + rng.randint(1, 40)]
        else:
            changed[at:at] = changed[at : at + rng.randint(1, 40)]
    return bytes(changed)


def originals() -> list[bytes]:
    """Small photographs, as it were: every subsampling, grey, restart markers, progressive, CMYK."""
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    small = rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((83, 61), Image.Resampling.BICUBIC)
    options = [{"subsampling": s} for s in ("4:4:4", "4:2:2", "4:2:0")]
    options += [{"restart_marker_blocks": 3}, {"optimize": True, "quality": 98}, {"progressive": True}]
    for image, given in [(picture, o) for o in options] + [(picture.convert(mode), {}) for mode in ("L", "CMYK")]:
        file = io.BytesIO()
        image.save(file, "JPEG", **given)
        files.append(file.getvalue())
    return files


def main(folder: str, seconds: str) -> None:
    sys.path.insert(0, folder)
    import vitline_native

    rng, files, until, num = random.Random(0), originals(), time.monotonic() + float(seconds), 0
    while time.monotonic() < until or num <= 1000:
        data, side = damaged(rng.choice(files), rng), rng.randint(1, 70)
        height, width = vitline_native.size(data) or (61, 83)
        top, left = rng.randrange(height), rng.randrange(width)
        box = (top, left, rng.randint(1, height - top), rng.randint(1, min(width - left, 500)))
        vitline_native.view(data, *box, np.empty((side, side, 3), np.uint8), side, rng.random() < 0.5)
        num += 1
    print(num)


if __name__ == "__main__":
    main(*sys.argv[1:])
