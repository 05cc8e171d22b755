"""Passes frames between two network interfaces with a delay, for kernels without netem."""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

_SOL_PACKET, _IGNORE_OUTGOING, _VNET_HDR = 263, 23, 15  # linux/if_packet.h
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_ALL_PROTOCOLS = 3
_LARGEST_FRAME, _BUFFER_BYTES = 2**16 + 64, 2**25
_LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def delayed(one: str, other: str, delay_s: float) -> Iterator[None]:
    """Meanwhile each frame that arrives at one of two interfaces leaves by the other `delay_s` later. Both belong to the network
    namespace of this thread."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_opened(name)) for name in (one, other))
        for source, target in ((first, second), (second, first)):
            thread = threading.Thread(target=_pass_on, args=(source, target, delay_s, over))
            thread.start()
            stack.callback(thread.join)
        stack.callback(over.set)
        yield


def _opened(interface: str) -> socket.socket:
    """Frames with the header that says what the kernel left to a network card: checksums and the cutting of large segments."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    opened.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (_SNDBUFFORCE, _RCVBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    opened.bind((interface, 0))
    return opened


def _pass_on(source: socket.socket, target: socket.socket, delay_s: float, over: threading.Event) -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # this thread; else busy processors add to the delay
    waiting = deque[tuple[float, bytes]]()
    while not over.is_set():
        wait_s = waiting[0][0] - time.monotonic() if waiting else _LOOK_EVERY_S
        if select.select([source], [], [], max(0.0, wait_s))[0]:
            waiting.append((time.monotonic() + delay_s, source.recv(_LARGEST_FRAME)))
        while waiting and waiting[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # a frame may get lost
                target.send(waiting.popleft()[1])
