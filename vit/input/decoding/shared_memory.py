"""Memory that input processes share with the training, and the socket over which they speak.

The memory has no name (memfd_create): each process gets it as a file descriptor over the socket. So the kernel frees it when the
last process that has it ends, however it ends, and it does not depend on the size of /dev/shm, which containers keep small.
"""

import mmap
import os
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_HEADER = struct.Struct("<QI")
Received = TypeVar("Received", bytes, list[int])


class Link:
    """One end of a connection of two processes: sends and receives objects, with file descriptors beside them.

    One thread may send while another receives.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Sends an object and copies of the descriptors. Raises EOFError if the other end is closed."""
        body = pickle.dumps(message)
        try:
            self._socket.sendall(_HEADER.pack(len(body), len(descriptors)) + body)
            for descriptor in descriptors:
                socket.send_fds(self._socket, [b"."], [descriptor])
        except OSError as error:
            raise EOFError(f"the connection has ended: {error}") from error

    def receive(self) -> tuple[Any, list[int]]:
        """The next object and its descriptors, which the caller closes. Raises EOFError if the other end is closed."""
        length, count = _HEADER.unpack(self._exactly(_HEADER.size))
        message, descriptors = pickle.loads(self._exactly(length)), list[int]()
        for _ in range(count):
            descriptors += self._descriptor()
        return message, descriptors

    def close(self) -> None:
        """Wakes whoever receives at either end."""
        with suppress(OSError):  # the other end may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            received += _unless_ended(partial(self._socket.recv, min(length - len(received), 2**20)))
        return bytes(received)

    def _descriptor(self) -> list[int]:
        return _unless_ended(lambda: socket.recv_fds(self._socket, 1, 1)[1])


def _unless_ended(receive: Callable[[], Received]) -> Received:
    """What is received. Raises EOFError if the connection has ended, at either end."""
    try:
        received = receive()
    except OSError as error:
        raise EOFError(f"the connection has ended: {error}") from error
    if not received:
        raise EOFError("the other process has closed the connection")
    return received


def new_memory(num_bytes: int) -> int:
    """A descriptor of new memory, all zeros."""
    descriptor = os.memfd_create("vitline-batches", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """The memory of a descriptor, which is closed. It lives as long as arrays of it do."""
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


class BatchBuffers:
    """Numbered pieces of shared memory, each for one micro-batch. A piece is free again once no tensor of it is left.

    There are as many as were in use at a time. Thread-safe but for `take`, which one thread calls.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._slots: list[mmap.mmap] = []
        self._free: deque[int] = deque()

    def take(self) -> tuple[int, Tensor, int | None]:
        """Number and memory, uint8 (num_bytes,), of a free slot; and its descriptor, which the caller closes, if it is new."""
        descriptor = None
        if self._free:
            number = self._free.popleft()
        else:
            descriptor, number = new_memory(self._num_bytes), len(self._slots)
            self._slots.append(mmap.mmap(descriptor, self._num_bytes))
        whole = np.frombuffer(self._slots[number], dtype=np.uint8)
        # All tensors that are made of this one keep the array alive.
        weakref.finalize(whole, self._free.append, number).atexit = False
        return number, torch.from_numpy(whole), descriptor
