"""Keyed work on a real Ray: results as they come, kept processes, processes that die, errors with their types, stops."""

import json

import pytest

from vitline.infra.runs.lease import acquire_lease
from vitline.infra.storage import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = """
import json, os, signal, sys, threading, time
from collections import deque
import ray
from vitline.infra.runs.ray_work import RayTask, run_keyed, run_many
from vitline.infra.runs.task_watch import TaskWatch

ray.init(log_to_driver=False)
folder, watch, found = sys.argv[1], TaskWatch(sys.argv[1], 1), {}

def several(number):
    yield from range(number)

def own_pid(number):
    return os.getpid()

def dies_once(marker):
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"

def dies(number):
    os.kill(os.getpid(), signal.SIGKILL)

def refuses(number):
    raise FileNotFoundError(2, "is not there", "picture.jpg")

def hangs(number):
    threading.Event().wait()

def ends_after_the_stop(number):
    open(f"{folder}/{number}-works", "w").close()
    while not os.path.exists(f"{folder}/end"):
        time.sleep(0.1)
    return number

def two_work(answers=[]):
    if len([name for name in os.listdir(folder) if name.endswith("-works")]) == 2:
        answers.append(True)
    if len(answers) == 2:  # what waits for a process has been cancelled since the first
        open(f"{folder}/end", "w").close()
    return answers

def results(work, *arguments, **given):
    tasks = deque(RayTask(f"{work.__name__}-{i}", argument) for i, argument in enumerate(arguments))
    try:
        return [result for _, result in run_keyed(work, tasks, **{"watch": watch, **given})]
    except Exception as error:
        return f"{type(error).__name__}: {error}"

tasks, found["grown"] = deque([RayTask("one", 1)]), []
for number, result in run_keyed(several, tasks, watch=watch):
    found["grown"].append([number, result])
    if result == number - 1 < 2:
        tasks.append(RayTask(f"then-{number}", number + 1))
found["kept"] = len(set(results(own_pid, *range(6), keep=1)))
found["not kept"] = [pid != os.getpid() for pid in {*results(own_pid, *range(3), watch=None)}]
found["again"] = results(dies_once, f"{folder}/any"), results(dies_once, f"{folder}/kept", keep=1)
found["dies"] = results(dies, 0)
found["not repeated"] = results(dies, 0, watch=None)
found["refused"] = results(refuses, 0)
end = time.monotonic() + 3
found["stopped"] = results(hangs, 0, 1, stop=lambda: time.monotonic() > end)
found["within the grace"] = results(ends_after_the_stop, *range(4), stop=two_work, grace_s=300)
found["longer than the grace"] = results(hangs, 0, stop=time.time, grace_s=2)
found["many"] = sorted(run_many(lambda number: number**2, [RayTask(f"{n}", n) for n in range(5)], watch=watch))
with open(f"{folder}/found.json", "w") as file:  # Ray writes lines of its own to stdout
    json.dump(found, file)
"""


def test_keyed_work_on_a_real_ray(ray_jobs, tmp_path):
    acquire_lease(open_store(tmp_path), "work", job_state=lambda job: "failed", owner="test")
    ray_jobs.submit("keyed-work", ["python", "-c", PROGRAM, str(tmp_path)], {}, {})
    ended = ray_jobs.follow("keyed-work", lambda _: None, poll_s=0.2)
    assert ended.state == "succeeded", ray_jobs.logs("keyed-work")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["grown"] == [[1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert found["kept"] == 1
    assert found["not kept"] == [True] * 3
    assert found["again"] == [["done"], ["done"]]
    assert "dies-0 was tried" in found["dies"]
    assert "its process was killed, perhaps for its memory" in found["dies"]
    assert found["not repeated"].startswith("WorkerCrashedError")
    assert found["refused"] == "FileNotFoundError: [Errno 2] is not there: 'picture.jpg'"
    assert found["stopped"] == []
    assert len(found["within the grace"]) == 2  # two others had not begun
    assert found["longer than the grace"] == []
    assert found["many"] == [0, 1, 4, 9, 16]
