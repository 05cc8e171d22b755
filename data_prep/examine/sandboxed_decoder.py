"""Decodes images in a separate process, so that a decoder that crashes or hangs costs one image and never the job.

The process is started fresh, never forked, and is kept for later tasks of this worker. Its address space and the time per image
are limited. The image on which the process dies is tried once more, alone, in a fresh process, and then refused as
`decoder_crash`; the images after it are not affected. The limits belong to `execution` and not to the identity of a corpus,
because they only decide about images near them. At the policy's default of 89 million pixels, the most demanding format (JPEG 2000
with alpha) needs 2.2 GiB of address space. With less, some decoders report lack of memory as a corrupt file.

On Linux the process ends with this one in any case. On other POSIX systems it ends when its input ends, which a decoder in an
endless loop does not notice; macOS may not limit its address space. Windows is not supported.
"""

import atexit
import contextlib
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np

from vitline.data_prep.decode import DecodePolicy, ImageRejected
from vitline.data_prep.examine.check_answer import check_decoded, check_examined
from vitline.data_prep.examine.decode_server import (
    ANSWER,
    MAX_ANSWER_BYTES,
    PIXELS,
    REQUEST,
    Kind,
    ServerSettings,
    decode_answer,
)
from vitline.data_prep.examine.images import Examined
from vitline.data_prep.examine.local_range import LocalRange
from vitline.infra.children import how_it_ended, start_python
from vitline.infra.settings import inherited_environment

T = TypeVar("T")
Outcome = Examined | ImageRejected
_Answer = Outcome | np.ndarray

_PIPE_BYTES = 1024 * 1024  # Linux's default of 64 KiB is less than a photograph: the child would wait
_MAX_IN_FLIGHT = 32
_AHEAD_BYTES = _PIPE_BYTES * 3 // 4  # leaves room for the next photograph in one write
_MAX_TRIES = 2
_MAX_IDLE = 4
_START_S, _EXIT_S = 120.0, 10.0
# A process that has used this much CPU time gets no more images. The system ends it where it goes on: above, there is room for
# twice the time of all images that it may still have.
_CPU_S = 600


class SandboxedDecoder:
    """Examines images in another process. Use one examiner per thread.

    Leaving `with` keeps the process for the next examiner, or kills it if it still has images.
    """

    def __init__(
        self,
        policy: DecodePolicy,
        *,
        timeout_s: float,
        memory_bytes: int,
        function: str = "vitline.data_prep.examine.images.examine_image",
    ) -> None:
        cpu_s = math.ceil(_CPU_S + 2 * _MAX_IN_FLIGHT * timeout_s)
        self._settings = ServerSettings(policy=policy, memory_bytes=memory_bytes, cpu_s=cpu_s, function=function)
        self._timeout_s = timeout_s
        self._child: _Child[Any] | None = None
        self._running = False
        self.lacking: tuple[str, ...] = ()
        """Protections that the system of the last process lacks, in words; known after the first image."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_if_busy()
        if self._child:
            _POOL.keep(self._child)
            self._child = None

    def run(self, images: Iterable[tuple[T, bytes | LocalRange]]) -> Iterator[tuple[T, Outcome]]:
        """Yield tag and verdict of every image, in order. Only one run at a time. Ranges are closed.

        Images are read ahead up to the capacity of the pipe, 1 MiB or 32 images; large ones one by one. Memory: two or three
        images. Raises RuntimeError if the process cannot be started, and whatever `images` raises.
        """
        assert not self._running, "an examiner runs one batch of images at a time"
        self._running = True
        source, waiting, more = iter(images), deque[_Image[T]](), True
        try:
            while True:
                while more and not waiting and (self._child is None or self._child.has_room()):
                    taken = [_Image(tag, data) for tag, data in islice(source, 1)]
                    more = bool(taken)
                    waiting.extend(taken)
                    self._hand_over(waiting)
                if not waiting and not (self._child and self._child.in_flight):
                    return
                yield from self._verdicts(waiting)
        finally:
            self._running = False
            self._end_if_busy()

    def _hand_over(self, waiting: "deque[_Image[T]]") -> None:
        """Send the child what it has room for. An image on which a child died before is sent alone."""
        while waiting:
            if self._child and self._child.is_spent() and not self._child.in_flight:
                self._child.end()
                self._child = None
            child = self._child = self._child or _POOL.take(self._settings)
            alone = waiting[0].failures or (child.in_flight and child.in_flight[0].failures)
            if not child.has_room() or (alone and child.in_flight):
                return
            child.send(waiting.popleft())

    def _verdicts(self, waiting: "deque[_Image[T]]") -> list[tuple[T, Outcome]]:
        """The verdicts that are available or come next. Empty after a first failure, or if there is room for more images."""
        self._hand_over(waiting)
        assert self._child
        try:
            found = self._child.answers(self._timeout_s)
            self.lacking = self._child.lacking
            return found
        except _Died as death:
            waiting.extendleft(reversed(self._child.in_flight))
            self._end_if_busy()
            waiting[0].failures += 1
            if waiting[0].failures < _MAX_TRIES:
                return []
            detail = f"{death} (tried {_MAX_TRIES} times)"
            return [(waiting.popleft().done(), ImageRejected("decoder_crash", detail))]

    def _end_if_busy(self) -> None:
        if self._child and self._child.in_flight:
            self._child.end()
            self._child = None


@dataclass(slots=True)
class _Image(Generic[T]):
    tag: T
    data: bytes | LocalRange
    failures: int = 0

    def done(self) -> T:
        """Release the bytes."""
        if isinstance(self.data, LocalRange):
            self.data.close()
        return self.tag


class _Died(Exception):
    """The child cannot be used any more; the text says why."""


class _Child(Generic[T]):
    """One process, its pipes and the images that were sent to it."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.in_flight: deque[_Image[T]] = deque()
        self._bytes_in_flight = 0
        self._process = _start(settings)
        assert self._process.stdin
        assert self._process.stdout
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        _widen(self._to)
        # Two entries per image that is not fully sent: its length and its bytes.
        self._outgoing: deque[memoryview | LocalRange] = deque()
        self._incoming = bytearray()
        self._ready = self._ended = False
        self.lacking: tuple[str, ...] = ()
        self._since = time.monotonic()  # start of its work on the first image in flight, or of the process

    def alive(self) -> bool:
        return self._process.poll() is None

    def is_spent(self) -> bool:
        """Whether another process should take the next images, because of the limit of CPU time."""
        if sys.platform != "linux":
            return False
        # The clock of another process, as clock_getcpuclockid(3) of the C library makes it.
        with contextlib.suppress(OSError):  # it has ended, which its pipe will say
            return time.clock_gettime(~self._process.pid << 3 | 2) > _CPU_S
        return False

    def has_room(self) -> bool:
        num_images = len(self.in_flight)
        if num_images and self.is_spent():
            return False
        return not self._outgoing and (
            num_images < 2 or (num_images < _MAX_IN_FLIGHT and self._bytes_in_flight < _AHEAD_BYTES)
        )

    def send(self, image: _Image[T]) -> None:
        """Send an image to the child as far as its pipe has room; `answers` sends the rest."""
        if self._ready and not self.in_flight:
            self._since = time.monotonic()
        self.in_flight.append(image)
        self._bytes_in_flight += len(image.data)
        data = image.data if isinstance(image.data, LocalRange) else memoryview(image.data)
        self._outgoing += (memoryview(REQUEST.pack(len(image.data))), data)
        self._write()

    def answers(self, timeout_s: float) -> list[tuple[T, Outcome]]:
        """Wait for answers, or until everything is sent. Raises _Died, and RuntimeError if the process does not start."""
        sending, since, late = bool(self._outgoing), self._since, False
        while True:
            if found := self._parse():
                return found
            limit_s = timeout_s if self._ready else _START_S
            # If this process was slow to read, answers may be waiting: the timeout counts from the last answer found.
            if self._ended or (late and self._since == since):
                raise self._death(limit_s)
            if sending and not self._outgoing:
                return []
            since = self._since
            left_s = since + limit_s - time.monotonic()
            late = left_s <= 0
            self._wait(left_s)

    def end(self) -> None:
        """Kill the process if it is alive, and release its resources."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        self.in_flight.clear()

    def _num_sent(self) -> int:
        return len(self.in_flight) - (len(self._outgoing) + 1) // 2

    def _wait(self, at_most_s: float) -> None:
        pipes = select.poll()
        pipes.register(self._from, select.POLLIN)
        # As long as the child has a complete image, the rest can wait for the next answer: fewer, larger writes.
        if self._outgoing and self._num_sent() < 2:
            pipes.register(self._to, select.POLLOUT)
        for pipe, _ in pipes.poll(1000 * max(0.0, at_most_s)):
            if pipe == self._from:
                self._read()
        self._write()

    def _write(self) -> None:
        while self._outgoing:
            first_was_sent = self._num_sent() > 0
            data = self._outgoing[0]
            try:
                written = self._write_some(data)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._outgoing.clear()  # reading returns the earlier answers first, then the end
                return
            self._outgoing.popleft()
            if written < len(data):
                self._outgoing.appendleft(data.after(written) if isinstance(data, LocalRange) else data[written:])
            if not first_was_sent and self._ready:
                self._since = time.monotonic()

    def _write_some(self, data: memoryview | LocalRange) -> int:
        if isinstance(data, LocalRange) and len(data):
            return data.write_to(self._to)
        return 0 if isinstance(data, LocalRange) else os.write(self._to, data)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._from, MAX_ANSWER_BYTES)
            self._incoming += data
            self._ended = not data

    def _parse(self) -> list[tuple[T, Outcome]]:
        found: list[tuple[T, Outcome]] = []
        while len(self._incoming) >= ANSWER.size:
            kind, length = ANSWER.unpack_from(self._incoming)
            end, most = ANSWER.size + length, self.settings.most_bytes(kind)
            if len(self._incoming) < end and length <= most:
                break
            try:
                if length > most:
                    raise _Died(f"the decoder announced an answer of {length:,} bytes, above the limit")
                verdict = self._verdict(kind, self._incoming[ANSWER.size : end])
            except _Died:
                if not found:
                    raise
                break  # return the earlier answers first; the error comes up again
            del self._incoming[:end]
            self._since = time.monotonic()
            if verdict is not None:
                answered = self.in_flight.popleft()
                self._bytes_in_flight -= len(answered.data)
                found.append((answered.done(), verdict))
        return found

    def _verdict(self, kind: int, body: bytearray) -> Outcome | None:
        if kind == Kind.READY and not self._ready:
            self._ready = True
            self.lacking = tuple(body.decode(errors="replace").splitlines())
            return None
        if not (self._ready and self._num_sent() > 0):
            raise _Died("the decoder sent an answer without a request")
        try:
            verdict = decode_answer(kind, body)
            self._check(verdict)
        except ValueError as error:
            raise _Died(f"the decoder sent {error}") from error
        if isinstance(verdict, str):
            raise _Died(verdict)
        return cast(Outcome, verdict)

    def _check(self, verdict: _Answer | str) -> None:
        """Raises ValueError if an answer contradicts the bytes of its image, so that a decoder that was taken over gains
        nothing."""
        data, policy = self.in_flight[0].data, self.settings.policy
        asked_for = np.ndarray if self.settings.function == PIXELS else dict
        if not isinstance(verdict, asked_for | ImageRejected | str):
            raise ValueError("an answer of another kind than it was asked for")
        if isinstance(verdict, np.ndarray):
            check_decoded(data, verdict.shape[1], verdict.shape[0], policy)
        elif isinstance(verdict, dict):
            check_examined(data, verdict, policy)

    def _death(self, limit_s: float) -> Exception:
        if self._ended:  # otherwise it hangs; so does one that closed its output but does not exit
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        status = self._process.poll()
        how = f"no answer within {limit_s:g} s" if status is None else f"the decoder {how_it_ended(status)}"
        if self._ready:
            return _Died(how)
        self._process.kill()
        assert self._process.stderr
        output = self._process.stderr.read().decode(errors="replace").strip()
        self.end()
        return RuntimeError(
            f"The process that decodes images does not start: {how}. Its output:\n{output}\n"
            f"It was started as {sys.executable}. Correct the environment of this worker."
        )


# A process that handles untrusted bytes gets no secrets of this process in its environment.
_INHERITED = {"LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME"}
# Decoding one image at a time needs no thread per core, whose stacks count as address space. By default glibc would return the
# memory of each image to the kernel and request it again: 15 % of the time of a small photograph.
_TUNED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}


def _start(settings: ServerSettings) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in inherited_environment(()).items() if name in _INHERITED}
    return start_python(
        "vitline.data_prep.examine.decode_server",
        settings.model_dump_json(),
        str(os.getpid()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment | _TUNED,
    )


def _widen(pipe: int) -> None:
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # the total size of a user's pipes is limited
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class _Pool:
    """The idle children of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child[Any]] = []
        # Linux ends a child with the *thread* that started it, and the thread of a task may end before the process.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="decode-child-starter")

    def take(self, settings: ServerSettings) -> _Child[Any]:
        """A child with these settings, idle or new."""
        with self._lock:
            fitting = [child for child in self._idle if child.settings == settings]
            dead = [child for child in fitting if not child.alive()]
            chosen = next((child for child in reversed(fitting) if child not in dead), None)
            self._idle = [child for child in self._idle if child is not chosen and child not in dead]
        for child in dead:
            child.end()
        return chosen or self._starter.submit(_Child, settings).result()

    def keep(self, child: _Child[Any]) -> None:
        """Keep a child for later, and end those that have been idle longest."""
        with self._lock:
            self._idle.append(child)
            surplus, self._idle = self._idle[:-_MAX_IDLE], self._idle[-_MAX_IDLE:]
        for child in surplus:
            child.end()

    def end_all(self) -> None:
        with self._lock:
            children, self._idle = self._idle, []
        for child in children:
            child.end()


_POOL = _Pool()
atexit.register(_POOL.end_all)
if hasattr(os, "register_at_fork"):
    # Two processes that share a pipe would receive each other's verdicts.
    os.register_at_fork(after_in_child=_POOL.__init__)  # type: ignore[misc]
