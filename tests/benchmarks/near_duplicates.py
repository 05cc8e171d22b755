"""Near duplicates: how many are found, how many are wrong, and how fast. Commands:

    python tests/benchmarks/near_duplicates.py quality FOLDER [--without PART] [--num 2500]
    python tests/benchmarks/near_duplicates.py speed

Quality. All pictures below FOLDER (no links, pictures with equal pixels once, no paths that contain PART) are the table.
Of `num` of them, at least 64 pixels on the shorter side so that half of one still fills a thumbnail, every
transformation is searched for in the table by hash and mirror hash, and what is near is confirmed on thumbnails, as
preparation does. Recall: share of queries that found their original. A match with another original is counted twice
over: as wrong always (strict precision), and as right if the two originals are one picture by a measure that shares
nothing with the confirmation: at 128 pixels, at the best of the windows that cut up to 10 % off any edge, plain or
mirrored, brightness and contrast leave at most 5 % of the variance unexplained.
Then 10 million random pairs of different originals: share with near hashes, and share confirmed.
"""

import argparse
import functools
import io
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from vitline.data_prep.decode import ImageRejected, decode
from vitline.data_prep.examine.images import perceptual_hashes, pixel_sha256
from vitline.data_prep.examine.thumbnails import looks_same, same_images, thumbnail
from vitline.data_prep.plan.similarity.near_duplicates import MAX_DISTANCE, HashIndex, band_keys, distances

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"})
SIDE_PX, MOST_UNEXPLAINED, MOST_CUT = 128, 0.05, 0.1
Loaded = tuple[Path, bytes, bytes, bytes, np.ndarray, int]


def cut(pixels: np.ndarray, share: float, place: np.random.Generator | None) -> np.ndarray:
    """A window of `share` of either side, at a random place or in the middle."""
    height, width = (max(1, round(side * share)) for side in pixels.shape[:2])
    room = pixels.shape[0] - height, pixels.shape[1] - width
    top, left = (place.integers(0, r + 1) if place else r // 2 for r in room)
    return pixels[top : top + height, left : left + width]


def half(pixels: np.ndarray) -> np.ndarray:
    height, width = (max(1, side // 2) for side in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=50)
    return decode(file.getvalue())


def brightness(pixels: np.ndarray, factor: float) -> np.ndarray:
    return np.clip(np.round(pixels * factor), 0, 255).astype(np.uint8)


Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
CHANGES: dict[str, Change] = {
    "half the size": lambda pixels, _: half(pixels),
    "JPEG quality 50": lambda pixels, _: jpeg(pixels),
    "brightness + 10 %": lambda pixels, _: brightness(pixels, 1.1),
    "brightness - 10 %": lambda pixels, _: brightness(pixels, 0.9),
    "flip": lambda pixels, _: pixels[:, ::-1],
    "5 % of area cut off, anywhere": lambda pixels, rng: cut(pixels, 0.95**0.5, rng),
    "5 % of both sides, evenly": lambda pixels, _: cut(pixels, 0.95, None),
    "5 % of both sides, anywhere": lambda pixels, rng: cut(pixels, 0.95, rng),
}


def loaded(path: Path) -> Loaded | None:
    try:
        pixels = decode(path.read_bytes())
    except ImageRejected:
        return None
    plain, mirror = perceptual_hashes(pixels)
    return path, pixel_sha256(pixels), plain, mirror, thumbnail(pixels), min(pixels.shape[:2])


def changed(task: tuple[int, Path]) -> list[tuple[bytes, bytes, np.ndarray]]:
    number, path = task
    pixels = decode(path.read_bytes())
    results = []
    for change in CHANGES.values():
        other = np.ascontiguousarray(change(pixels, np.random.default_rng(number)))
        results.append((*perceptual_hashes(other), thumbnail(other)))
    return results


def words(hashes: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4)


# The independent measure.


@functools.lru_cache(maxsize=64)
def picture(path: Path) -> Image.Image:
    return Image.fromarray(decode(path.read_bytes()))


def unexplained(a: Image.Image, b: Image.Image, window: tuple[float, float, float, float]) -> float:
    """1 - correlation at 128 pixels of a and the window of b from which (left, top, right, bottom) are cut."""
    left, top, right, bottom = window
    box = (left * b.width, top * b.height, b.width * (1 - right), b.height * (1 - bottom))
    size = (SIDE_PX, SIDE_PX)
    x = np.asarray(a.resize(size, Image.Resampling.BICUBIC, reducing_gap=3), np.float64)
    y = np.asarray(b.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3), np.float64)
    return 1.0 - float(np.corrcoef(x.ravel(), y.ravel())[0, 1]) if x.std() > 0 and y.std() > 0 else 1.0


def least_unexplained(a: Image.Image, b: Image.Image) -> float:
    """Over windows of b, by moving one edge, or all of them, in steps of 3, 1.5 and 0.75 %."""
    best: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    least = unexplained(a, b, best)
    singles = [tuple(sign * (k == edge) for k in range(4)) for edge in range(4) for sign in (-1, 1)]
    moves = [*singles, (1, 0, -1, 0), (-1, 0, 1, 0), (0, 1, 0, -1), (0, -1, 0, 1), (1, 1, 1, 1), (-1, -1, -1, -1)]
    for step in (0.03, 0.015, 0.0075):
        for _ in range(6):
            windows = [tuple(np.clip(np.add(best, np.multiply(move, step)), 0, MOST_CUT).tolist()) for move in moves]
            scores = [unexplained(a, b, window) for window in windows]
            if min(scores) >= least:
                break
            least, best = min(scores), windows[int(np.argmin(scores))]
    return least


def one_picture(paths: tuple[Path, Path]) -> bool:
    a, b = (picture(path) for path in paths)
    views = (a, a.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    whole = (0.0, 0.0, 0.0, 0.0)
    if min(unexplained(view, b, whole) for view in views) <= MOST_UNEXPLAINED:
        return True
    return any(least_unexplained(x, y) <= MOST_UNEXPLAINED for view in views for x, y in ((view, b), (b, view)))


def pair_is_same(pair: tuple[np.ndarray, np.ndarray]) -> bool:
    return looks_same(*pair)


def quality(folder: Path, without: str, num: int, num_random: int) -> None:
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file() and not p.is_symlink())
    paths = [p for p in paths if not (without and without in p.relative_to(folder).as_posix())]
    with multiprocessing.Pool() as pool:
        every = [row for row in pool.imap(loaded, paths, chunksize=32) if row]
        rows = list({row[1]: row for row in reversed(every)}.values())[::-1]
        no_hash = sum(not any(row[2]) for row in rows)
        print(
            f"{len(paths):,} files, {len(paths) - len(every)} refused, {len(rows):,} different, {no_hash} without contrast"
        )
        large = [i for i, row in enumerate(rows) if row[5] >= 64]
        chosen = np.random.default_rng(0).permutation(large)[:num]
        print(f"queries: {len(chosen):,} of the {len(large):,} with 64 pixels or more on the shorter side\n")
        table, mirrors = words([row[2] for row in rows]), words([row[3] for row in rows])
        variants = pool.map(changed, [(int(i), rows[i][0]) for i in chosen], chunksize=16)
        found = [Outcome(name, chosen) for name in CHANGES]
        for number, outcome in enumerate(found):
            own = [variant[number] for variant in variants]
            outcome.search(table, own)
            outcome.confirm([row[4] for row in rows], own, pool)
        others = sorted({pair for outcome in found for pair in outcome.others()})
        verdicts = pool.map(one_picture, [(rows[i][0], rows[j][0]) for i, j in others], chunksize=8)
        right = {pair for pair, verdict in zip(others, verdicts, strict=True) if verdict}
        print(f"{'':32s} {'near':>7s} {'recall':>7s} {'others':>7s} {'wrong':>6s} {'precision':>9s} {'strict':>7s}")
        for outcome in found:
            print(outcome.row(right))
        for pair in others:
            if pair not in right:
                print("  wrong: " + " | ".join(rows[i][0].relative_to(folder).as_posix() for i in pair))
        print_bands(table[chosen], mirrors[chosen], variants)
        print_random(rows, table, mirrors, num_random, pool)


class Outcome:
    """What the queries of one transformation found: rows of the table that are near, then those confirmed."""

    def __init__(self, name: str, chosen: np.ndarray) -> None:
        self.name, self.chosen = name, chosen
        self.near: list[tuple[int, int]] = []  # (query, row)
        self.same: list[tuple[int, int]] = []

    def search(self, table: np.ndarray, own: Sequence[tuple[bytes, bytes, np.ndarray]]) -> None:
        index, pairs = HashIndex(table), set()
        for side in (0, 1):
            query, row, _ = index.search(words([variant[side] for variant in own]))
            pairs.update(zip(query.tolist(), row.tolist(), strict=True))
        self.near = sorted(pairs)

    def confirm(
        self, thumbnails: Sequence[np.ndarray], own: Sequence[tuple], pool: "multiprocessing.pool.Pool"
    ) -> None:
        tasks = [(own[query][2], thumbnails[row]) for query, row in self.near]
        verdicts = pool.map(pair_is_same, tasks, chunksize=64)
        self.same = [pair for pair, verdict in zip(self.near, verdicts, strict=True) if verdict]

    def others(self) -> Iterator[tuple[int, int]]:
        for query, row in self.same:
            if row != self.chosen[query]:
                yield int(self.chosen[query]), row

    def row(self, right: set[tuple[int, int]]) -> str:
        num, others = len(self.chosen), list(self.others())
        near = sum(row == self.chosen[query] for query, row in self.near)
        own = len(self.same) - len(others)
        wrong = sum(pair not in right for pair in others)
        precision, strict = 1 - wrong / max(1, len(self.same)), own / max(1, len(self.same))
        return f"{self.name:32s} {near / num:7.4f} {own / num:7.4f} {len(others):7d} {wrong:6d} {precision:9.4f} {strict:7.4f}"


def print_bands(plain: np.ndarray, mirror: np.ndarray, variants: Sequence[Sequence[tuple]]) -> None:
    """Within a corpus: share of copies that meet their original in a band, by the width of the bands."""
    print(f"\n{'copies that share a band':32s} " + " ".join(f"{bits:3d} bit" for bits in (16, 24, 32, 40, 48)))
    for number, name in enumerate(CHANGES):
        own = words([variant[number][0] for variant in variants])
        shares = []
        for bits in (16, 24, 32, 40, 48):
            keys = band_keys(own, bits)
            meets = [(keys == band_keys(side, bits)).any(axis=1) & near(own, side) for side in (plain, mirror)]
            shares.append((meets[0] | meets[1]).mean())
        print(f"{name:32s} " + " ".join(f"{share:7.4f}" for share in shares))


def near(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(distances(a, b) <= MAX_DISTANCE)


def print_random(
    rows: Sequence[Loaded], table: np.ndarray, mirrors: np.ndarray, num: int, pool: "multiprocessing.pool.Pool"
) -> None:
    pairs = np.random.default_rng(1).integers(0, len(rows), (num, 2))
    pairs = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    parts = [part[near(table[part[:, 0]], table[part[:, 1]]) | near(mirrors[part[:, 0]], table[part[:, 1]])]
             for part in np.array_split(pairs, 1 + len(pairs) // 1_000_000)]  # fmt: skip
    close = np.concatenate(parts)
    close = close[table[close].any(axis=(1, 2))]
    different, times = np.unique(close, axis=0, return_counts=True)
    tasks = [(rows[i][4], rows[j][4]) for i, j in different]
    started = time.perf_counter()
    verdicts = np.array(pool.map(pair_is_same, tasks, chunksize=64), bool)
    each = (time.perf_counter() - started) / max(1, len(tasks)) * 1e3
    same = different[verdicts]
    wrong = ~np.array(pool.map(one_picture, [(rows[i][0], rows[j][0]) for i, j in same], chunksize=8), bool)
    num_same, num_wrong = int(times[verdicts].sum()), int(times[verdicts][wrong].sum())
    print(f"\n{len(pairs):,} random pairs: {len(close):,} near ({len(close) / len(pairs):.1e}), {num_same} confirmed "
          f"({num_same / len(pairs):.1e}), of them {num_wrong} wrong ({num_wrong / len(pairs):.1e}); "
          f"{each:.2f} ms a confirmation over {multiprocessing.cpu_count()} cores")  # fmt: skip


def photograph_hashes(num: int, seed: int) -> np.ndarray:
    """Hashes of unrelated pictures with the spectrum of photographs: noise of amplitude 1 / frequency."""
    rng = np.random.default_rng(seed)
    side = 32
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None]) + 1 / side / 4
    hashes = []
    for _ in range(num):
        plane = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(side, side))) / frequency)
        grey = np.clip(127 + 50 * plane / plane.std(), 0, 255).astype(np.uint8)
        hashes.append(perceptual_hashes(np.repeat(grey[..., None], 3, axis=2))[0])
    return words(hashes)


def speed(rounds: int) -> None:
    rng = np.random.default_rng(0)
    print("one picture, CPU ms (median of rounds)")
    for height, width in ((375, 500), (900, 900), (64, 64)):
        noise = np.asarray(Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((width, height)))
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=90)
        data = file.getvalue()
        steps: dict[str, Callable[[], object]] = {
            "decode": functools.partial(decode, data),
            "pixel_sha256": functools.partial(pixel_sha256, noise),
            "perceptual_hashes": functools.partial(perceptual_hashes, noise),
        }
        print(f"  {width} x {height} JPEG: " + ", ".join(f"{n} {cpu_ms(s, rounds):.3f}" for n, s in steps.items()))
    print_confirmation(rounds)
    tables = photograph_hashes(310_000, 0)
    print("search, queries per CPU second; queries unrelated, and copies with 8 random bits turned")
    for num in (1_000, 2_047, 2_048, 10_000, 300_000):
        started = time.process_time()
        index = HashIndex(tables[:num])
        built = time.process_time() - started
        strangers = tables[-10_000:]
        bits = np.unpackbits(tables[:num].view(np.uint8).reshape(num, 32), axis=1)[rng.integers(0, num, 10_000)]
        for row in bits:
            row[rng.choice(256, 8, replace=False)] ^= 1
        copies = np.packbits(bits, axis=1).view(np.uint64)
        speeds = [
            [10_000 / cpu_s(functools.partial(index.search, q)) for q in (strangers, copies)] for _ in range(rounds)
        ]
        middle = np.median(speeds, axis=0)
        runs = "; ".join(f"{a:,.0f} {b:,.0f}" for a, b in speeds)
        print(f"  {num:7,} hashes, built in {built:.2f} s: {middle[0]:9,.0f} {middle[1]:9,.0f}   (rounds: {runs})")


def print_confirmation(rounds: int) -> None:
    digits = load_digits()
    zeros = digits.images[digits.target == 0][:128]
    drawn = np.stack([thumbnail(np.repeat((zero * 15).astype(np.uint8)[..., None], 3, axis=2)) for zero in zeros])
    a, b = drawn[:64], drawn[64:]
    together = [cpu_s(lambda: same_images(a, b)) / len(a) * 1e3 for _ in range(rounds)]
    alone = [
        cpu_s(lambda: [looks_same(*pair) for pair in zip(a, b, strict=True)]) / len(a) * 1e3 for _ in range(rounds)
    ]
    print(
        f"confirmation of 64 pairs of zeros, CPU ms a pair: {np.median(together):.1f}, one by one {np.median(alone):.1f}"
    )


def cpu_s(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def cpu_ms(call: Callable[[], object], rounds: int) -> float:
    return float(np.median([cpu_s(lambda: [call() for _ in range(20)]) for _ in range(rounds)])) / 20 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("quality")
    command.add_argument("folder", type=Path)
    command.add_argument("--without", default="", help="leave out paths that contain this")
    command.add_argument("--num", type=int, default=2_500, help="pictures to transform")
    command.add_argument("--random-pairs", type=int, default=10_000_000)
    command = commands.add_parser("speed")
    command.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.command == "quality":
        quality(args.folder, args.without, args.num, args.random_pairs)
    else:
        speed(args.rounds)


if __name__ == "__main__":
    main()
