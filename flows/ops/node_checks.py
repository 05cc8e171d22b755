"""Checks of the machines that compute: every node of a Ray cluster by one small job, or this machine where commands start their own Ray.

The job's driver starts one task on each node, which needs no free CPU, and prints what each answers. Nodes talk to the store only: they
need neither Prefect nor MLflow, so nobody asks them for these.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from vitline.data_prep.decode import DecodePolicy
from vitline.data_prep.examine.sandboxed_decoder import SandboxedDecoder
from vitline.flows.ops.check import BUSY, DEADLINE_S, Check, Checks, patience, side_by_side
from vitline.flows.ops.service_checks import (
    CLOCK_ADVICE,
    MAX_CLOCK_DIFFERENCE_S,
    TIMEOUT_S,
    check_certificates,
    check_job_server,
    check_store_of_all,
    installed,
    object_of_doctor,
)
from vitline.infra.children import child_environment
from vitline.infra.config import FrozenConfig
from vitline.infra.plain_text import last_words
from vitline.infra.provenance import compared_versions, differing_versions, versions
from vitline.infra.ray_jobs import Job, JobServerAway, RayJobs, no_start
from vitline.infra.redact import cleaned
from vitline.infra.runs.ray_work import RayTask, living_nodes, run_keyed, start_ray, usable_nodes
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.input.decoding.which_decoder import HOW_TO_GET_IT, native_is_installed

NODE_S = 1.5 * DEADLINE_S
"""How long the driver waits for a node: for the start of a process there, and for its slowest check."""
JOB_S = BUSY * NODE_S + DEADLINE_S
"""How long the doctor waits for the job. Its driver may run on a busy machine, and ends before."""
MIN_FREE_BYTES = 10**9
DECODER_BYTES = 4 << 30
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices of the drivers of NVIDIA, of Windows Subsystem for Linux, and of AMD."""
_ANSWERS = "vitline-doctor-answers:"
_JOB = "import sys; from vitline.flows.ops.node_checks import ask_nodes; ask_nodes(*sys.argv[1:])"
_MOST_NAMED = 3


class NodeAnswer(FrozenConfig):
    """What a node says of itself."""

    began_at: float
    """Unix seconds, by the clock of the node."""
    took_s: float
    has_torch: bool
    facts: str
    checks: tuple[Check, ...]


class Node(FrozenConfig):
    """A node as the driver of the job saw it."""

    name: str
    gpus: float = 0
    """Those that Ray knows of."""
    ahead_s: float = 0
    """The least by which its clock is ahead of that of the driver's node, or, if negative, behind."""
    answer: NodeAnswer | None = None
    problem: str = ""
    """Why there is no answer."""


_Nodes = TypeAdapter(tuple[Node, ...])


def check_cluster(settings: Settings, shard_cache_dir: str = "") -> list[Check]:
    """The configured job server, then one line for each kind of node, and one for each fault with the nodes that have it."""
    server = check_job_server(settings)
    if not server.ok:
        return [server]
    try:
        nodes = _ask_by_job(settings, shard_cache_dir)
    except (JobServerAway, RuntimeError, TimeoutError) as error:
        found = f"{server.found}, but a small job failed: {error}"[:600]
        return [Check("ray", False, found, "Fix what the message names, then run the doctor again.")]
    ran = f"{server.found}, and a small job ran in {settings.python_of_jobs()}"
    return [server._replace(found=ran), *judge(nodes)]


def _ask_by_job(settings: Settings, shard_cache_dir: str) -> tuple[Node, ...]:
    """Runs the job with the Python of all jobs. Raises RuntimeError with what is wrong and what to do, JobServerAway, and TimeoutError."""
    python, job_id = settings.python_of_jobs(), f"vitline-doctor-{uuid.uuid4().hex[:12]}"
    jobs = RayJobs(str(settings.ray_address), settings.ray_auth_token_path, TIMEOUT_S * patience())
    began = time.monotonic()

    def on_time(job: Job) -> None:
        if time.monotonic() - began > JOB_S:
            raise TimeoutError(f"it is still {job.state} after {JOB_S:.0f} s; see its log at {jobs.page(job_id)}")

    env = {"VITLINE_ROOT": open_store(settings.root).uri, "VITLINE_SUBMITTED_FROM": json.dumps(compared_versions())}
    with object_of_doctor(settings) as written:
        try:
            command = [python, "-P", "-c", _JOB, written, shard_cache_dir]
            jobs.submit(job_id, command, env, {"made_by": "vitline ops doctor"})
            job = jobs.follow(job_id, on_time, poll_s=0.2)
            log = jobs.logs(job_id)
        except TimeoutError:
            with suppress(JobServerAway, RuntimeError, TimeoutError):
                jobs.stop(job_id, wait_s=0)
            raise
    if job.state != "succeeded":
        raise RuntimeError(no_start(python, job, log.strip()) or last_words(log) or job.message)
    return _Nodes.validate_json(log.rpartition(_ANSWERS)[2].splitlines()[0])


def ask_nodes(written: str, shard_cache_dir: str) -> None:
    """In the driver of the job: asks all nodes at once and prints what they are like, in one line of JSON."""
    if differ := differing_versions():
        sys.exit(differ)
    start_ray()
    nodes, began = usable_nodes(), time.monotonic()
    if not nodes:
        sys.exit(f"no node of the cluster has {Settings().node_labels_text()} (VITLINE_NODE_LABELS)")
    work = partial(_answer, written, shard_cache_dir)

    def over() -> bool:
        return time.monotonic() - began > NODE_S * patience()

    def ask(node: dict[str, Any]) -> Node:
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node {node['NodeID'][:8]})"
        seen = partial(Node, name=name, gpus=node["Resources"].get("GPU", 0))
        task, asked_at = RayTask(f"doctor-{node['NodeID']}", None, cpus=0, node=node["NodeID"]), time.time()
        try:
            answer = dict(run_keyed(work, deque([task]), watch=None, stop=over)).get(None)
        except Exception as error:  # the other nodes must still be reported
            lost = all(each["NodeID"] != node["NodeID"] for each in living_nodes())
            return seen(problem="Ray lost it meanwhile" if lost else last_words(str(error))[:400])
        if answer is None:
            return seen(problem=f"no answer within {time.monotonic() - began:.0f} s")
        # It began after `asked_at`, and has ended by now.
        in_time = min(max(answer.began_at, asked_at), time.time() - answer.took_s)
        return seen(answer=answer, ahead_s=answer.began_at - in_time)

    with ThreadPoolExecutor(len(nodes)) as threads:
        found = tuple(threads.map(ask, nodes))
    if not installed("torch") and any(node.answer and node.answer.has_torch for node in found):
        raise ModuleNotFoundError(
            "No module named 'torch'"
        )  # in this Python, which is to drive trainings of those nodes
    print(f"\n{_ANSWERS}{cleaned(_Nodes.dump_json(found).decode())}", flush=True)


def _answer(written: str, shard_cache_dir: str, _: None) -> NodeAnswer:
    """In a process of a node."""
    began_at, began = time.time(), time.monotonic()
    checks = side_by_side(
        [
            ("store", lambda: check_store_of_all(Settings(), written)),
            ("disk", lambda: check_free("disk", tempfile.gettempdir(), needed=True)),
            *machine_checks(shard_cache_dir),
        ]
    )
    here = {**compared_versions(), "commit": versions().get("commit", "unknown")[:7]}
    machine = f"{os.cpu_count()} CPUs, {psutil.virtual_memory().total / 1e9:.0f} GB"
    found = [f"{check.name}: {check.found}" for check in checks if check.mark == "ok"]
    return NodeAnswer(
        began_at=began_at,
        took_s=time.monotonic() - began,
        has_torch="torch" in here,
        facts="; ".join([", ".join(" ".join(each) for each in here.items()), machine, *found]),
        checks=tuple(checks),
    )


def judge(nodes: Sequence[Node]) -> list[Check]:
    """A line for all nodes that say the same of themselves, then one for each fault."""
    on_cpus = not any(node.gpus for node in nodes) and any(node.answer and node.answer.has_torch for node in nodes)
    facts, faults = dict[Check, list[str]](), dict[Check, list[str]]()
    for node in nodes:
        if node.answer:
            facts.setdefault(Check("nodes", True, node.answer.facts), []).append(node.name)
        for fault in _faults(node, on_cpus):
            faults.setdefault(fault, []).append(node.name)
    return [check._replace(found=f"{_few(names)}: {check.found}") for check, names in (facts | faults).items()]


def _faults(node: Node, on_cpus: bool) -> Iterator[Check]:
    if node.answer is None:
        advice = "Look at the machine, its network, and Ray's logs there (`raylet.out`)."
        if "No module named" in node.problem or "submitted from" in node.problem:
            advice = "Install there what is installed where the doctor runs: all of requirements.lock."
        yield Check("nodes", False, node.problem, advice)
        return
    if on_cpus and not node.answer.has_torch:
        advice = "Install vitline[train] there, or keep trainings away: `execution.placement.node_labels`."
        yield Check("nodes", True, "no torch: this node only prepares data", advice)
    if abs(node.ahead_s) > MAX_CLOCK_DIFFERENCE_S:
        side = "ahead of" if node.ahead_s > 0 else "behind"
        yield Check("nodes", False, f"its clock is {abs(node.ahead_s):.0f} s or more {side} the driver's", CLOCK_ADVICE)
    for check in node.answer.checks:
        if check.mark != "ok":
            yield check._replace(name="nodes", found=f"{check.name}: {check.found}")


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def machine_checks(shard_cache_dir: str = "") -> Checks:
    """What any machine that trains or prepares needs."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("certificates", check_certificates),
        ("accelerator", check_accelerator),
        ("decoder", check_decoder),
        ("native decoder", check_native_decoder),
    ]
    if shard_cache_dir:
        checks.append(("shard cache", lambda: check_free("shard cache", shard_cache_dir, needed=False)))
    return checks


def check_free(name: str, folder: str, *, needed: bool) -> Check:
    """Free disk space of a folder, or of its first existing parent. Rounded down to a power of ten, so that similar nodes share a line."""
    path = Path(folder).expanduser()
    free = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
    if free >= MIN_FREE_BYTES:
        return Check(name, True, f"over {10 ** int(math.log10(free / 1e9)):,} GB free at {folder}")
    return Check(
        name, not needed, f"{free / 1e9:.1f} GB free at {folder}", "Free some, or choose a folder on another disk."
    )


def check_accelerator() -> Check:
    """The GPUs that torch can use. Without a GPU device in the kernel, torch is not imported: that takes seconds."""
    if not any(Path(device).exists() for device in GPU_DEVICES) and not shutil.which("nvidia-smi"):
        return Check("accelerator", True, "none: training runs on the CPU", "")
    if not installed("torch"):
        return Check("accelerator", False, "a GPU driver, but no torch", "Install vitline[train] there.")
    import torch

    if not torch.cuda.is_available():
        return Check("accelerator", False, "a GPU driver, but torch finds no GPU", "Install a CUDA build of torch.")
    gpus = Counter(
        f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)"
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    )
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.distributed.is_nccl_available() else ""
    found = f"{', '.join(f'{count} x {name}' for name, count in gpus.items())}, CUDA {torch.version.cuda}{nccl}"
    # `execution.compile` makes kernels with one.
    compiler = next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    advice = "" if compiler else "Install gcc if trainings there are to be compiled (`execution.compile`)."
    return Check("accelerator", True, f"{found}, {compiler or 'no C compiler'}", advice)


def check_decoder() -> Check:
    """That the decoding process starts, and what this system lacks to lock it in. Without a filter of system calls, what an image
    makes a decoder do can reach the network."""
    with SandboxedDecoder(DecodePolicy(), timeout_s=DEADLINE_S, memory_bytes=DECODER_BYTES) as decoder:
        list(decoder.run([(None, b"")]))
    if not decoder.lacking:
        return Check("decoder", True, "locked in by limits, Landlock and seccomp")
    found = f"this system lacks protections of the decoding process: {'; '.join(decoder.lacking)}"
    advice = (
        "Prepare images of people you do not trust on Linux 5.13 or newer (x86-64, aarch64), with Landlock and seccomp."
    )
    return Check("decoder", not any(text.startswith("seccomp") for text in decoder.lacking), found, advice)


def check_native_decoder() -> Check:
    """Which decoder trainings use here."""
    name = "native decoder"
    if not native_is_installed():
        return Check(
            name, True, f"not installed: trainings decode whole images, with the same results; {HOW_TO_GET_IT}"
        )
    if problem := native_problem():
        found = f"installed, but not used here: {problem}; trainings decode whole images, with the same results"
        advice = "Delete `.venv/native-decoder` and run `make install`: it builds the decoder with the libraries of this machine."
        return Check(name, False, found, advice)
    return Check(name, True, "installed; its pixels are equal to those of whole images")


def native_problem() -> str:
    """Why a training would not use the native decoder; empty if it would. Asked in a process of its own, because comparing pixels
    takes torch."""
    program = (
        "from vitline.vit.input.decoding.native_view import native_decoder; raise SystemExit(native_decoder() is None)"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    return last_words(done.stderr) if done.returncode else ""
