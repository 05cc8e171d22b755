"""What is said about a node's input: rates worked out by hand, the limit, and what to change."""

from dataclasses import replace

import pytest

from vitline.vit.cost.input_speed import ReadSpeed, WorkerSpeed
from vitline.vit.cost.input_verdict import InputVerdict, Setting
from vitline.vit.input.prefetch import WaitTimes

# A worker that decodes with 4 threads at 1.25 ms an image; its store answers after 20 ms, and sends 6.4 MB in 60 ms more.
WORKER = WorkerSpeed(
    images_per_s=1500,
    first_batch_s=1.0,
    cpu_s_per_image=1.6e-3,
    decode_s_per_image=1.5e-3,
    decode_cpu_s_per_image=1.25e-3,
    hand_over_cpu_s_per_image=0.1e-3,
    waits=WaitTimes(store_s=1.0, decode_s=8.0, hand_over_s=1.0),
    read=ReadSpeed(answer_s=0.02, load_s=0.08, images_per_s=8000, bytes_per_image=100_000),
)
NODE = Setting(
    cores=16,
    threads=4,
    processes=0,
    lanes=32,
    loads_at_a_time=32,
    rows_per_group=64,
    read_ahead_bytes=2**31,
    open_bytes=2**30,
    split_bytes=10**12,
    can_cache=True,
)


def verdict(needed, workers=2, setting=NODE, **worker):
    return InputVerdict([replace(WORKER, **worker)] * workers, setting, needed)


def test_what_each_stage_could_feed_alone():
    assert verdict(4000).alone() == pytest.approx(
        {
            "store": 2 * 32 * 64 / 0.02,
            "network": 16_000,
            "decode": 2 * 4 / 1.5e-3,  # 5,333, less than what 16 cores could do at 625 images/s each
            "hand-over": 20_000,
        }
    )
    assert verdict(4000, setting=replace(NODE, cores=4)).alone()["decode"] == pytest.approx(4 / 1.6e-3)


def test_where_the_time_goes():
    found = verdict(4000)
    assert found.shares() == pytest.approx({"store": 0.025, "network": 0.075, "decode": 0.8, "hand-over": 0.1})
    assert found.limit == "decode"
    assert found.images_per_core_s == pytest.approx(625)


def test_nothing_is_to_change_where_no_gpu_waits():
    found = verdict(1250)
    assert found.sentence() == (
        "No GPU waits: a node feeds 3,000 of the 2,500 images/s that its 2 GPUs eat, 1.20 times as many as needed."
    )
    assert list(found.changes()) == []


def test_more_threads_where_cores_are_free():
    found = verdict(4000)
    assert found.sentence() == (
        "GPUs would wait 62% of the time: a node feeds 3,000 of the 8,000 images/s that its 2 GPUs eat; decoding is the limit."
    )
    assert list(found.changes()) == [  # 4,000 x 1.25 ms = 5 threads
        "threads: --set execution.decode_threads=5, which can decode 8,000 images/s on this node"
    ]


def test_processes_where_threads_wait_for_the_interpreter_lock():
    assert list(verdict(4000, decode_s_per_image=2.5e-3).changes()) == [
        "interpreter lock: with 4 threads in 1 process a worker's decoding waits 50% of the time for Python's interpreter lock, or for "
        "cores that other programs use; one process decodes 1,600 images/s",
        "processes: --set execution.decode_processes=3 --set execution.decode_threads=5, each of which has a lock of its own",
    ]
    two = replace(NODE, processes=2, lanes=2)  # no more than lanes
    (change,) = verdict(4000, setting=two, decode_s_per_image=2.5e-3).changes()
    assert "with 4 threads in 2 processes" in change
    assert change.endswith("one process decodes 800 images/s")


def test_more_cores_where_all_are_used():
    (change,) = verdict(6000, setting=replace(NODE, threads=8)).changes()  # 12,000 x 1.6 ms = 19.2 cores
    assert change == (
        "cores: 12,000 images/s take 20 cores, at 625 images/s a core; this node has 16, enough for 10,000 images/s: "
        "give such a node 1 of these GPUs at most"
    )
    *_, change = verdict(6000, workers=1, setting=replace(NODE, threads=2, cores=4)).changes()
    assert change.endswith("this node has 4, enough for 2,500 images/s: less than one of these GPUs eats")


def test_more_requests_or_bandwidth_where_the_store_is_slow():
    slow = {"waits": WaitTimes(9.0, 1.0, 0.0), "read": replace(WORKER.read, images_per_s=1000)}
    found = verdict(2000, **slow)
    assert found.limit == "network"
    assert found.loads_needed == 3  # 2,000 / 64 row groups a second x 0.08 s = 2.5
    assert list(found.changes()) == [
        "bandwidth: a node needs 400 MB/s of the store, which gave 200 MB/s",
        "cache: --set execution.shard_cache_dir=FOLDER --set execution.shard_cache_bytes=1000000000000, on a local disk that reads "
        "400 MB/s; from the second epoch on nothing comes from the store",
    ]
    cached = verdict(2000, setting=replace(NODE, can_cache=False), **slow)
    assert [change.partition(":")[0] for change in cached.changes()] == ["bandwidth"]
    distant = verdict(2000, **(slow | {"read": ReadSpeed(1.9, 2.0, 1000, 100_000)}))
    assert distant.limit == "store"
    assert next(iter(distant.changes())).startswith(
        "row groups: a worker must load 63 at a time and loads 32 at most; "
    )


def test_hand_over_of_one_process_and_read_ahead():
    late = verdict(12_500, workers=1, hand_over_cpu_s_per_image=0.1e-3, setting=replace(NODE, cores=64, threads=16))
    assert "hand-over: one worker plans 10,000 images/s at most in 1 process" in "\n".join(late.changes())
    assert verdict(1, setting=replace(NODE, processes=4)).alone()["hand-over"] == pytest.approx(80_000)
    (change,) = verdict(1250, setting=replace(NODE, read_ahead_bytes=2**28)).changes()
    assert change == (
        "read-ahead: --set execution.read_ahead_bytes=1073741824, as much as the row groups that a worker keeps open; with 268 MB "
        "batches wait where blocks end"
    )
