"""Send tensors from one process to another, with one block of shared memory per message.

object -> pickle plus raw tensors and arrays -> one unnamed block -> its descriptor over a socket -> views of it

A message is complete once it is sent: it survives the death of its sender, needs no server thread, leaves no file
behind, and is not bounded by the size of /dev/shm. A hung sender therefore cannot block its reader.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

_HEADER = struct.Struct("q")
_DESCRIPTOR = struct.Struct("i")
_ALIGNED = 64
"""Every tensor starts at a multiple of this many bytes, which is enough for any dtype and for vector loads."""
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def send_object(sock: socket.socket, value: Any) -> None:
    """Send one object. Does not block as long as few messages are in flight."""
    fd, size = _write_block(value)
    try:
        socket.send_fds(sock, [_HEADER.pack(size)], [fd])
    finally:
        os.close(fd)


def receive_object(sock: socket.socket, *, wait: bool) -> Any:
    """Receive the next object; its tensors are views of the shared block, which lives as long as one of them does.

    Raises EOFError when the other end is closed, BlockingIOError when there is none and `wait` is False.
    """
    # Not socket.recv_fds: it accepts flags but does not pass them on.
    flags = _CLOSED_ON_EXEC | (0 if wait else socket.MSG_DONTWAIT)
    header, extra, _, _ = sock.recvmsg(_HEADER.size, socket.CMSG_LEN(_DESCRIPTOR.size), flags)
    if len(header) < _HEADER.size or not extra:
        raise EOFError("the other end of the socket is closed")
    (fd,) = _DESCRIPTOR.unpack(extra[0][2])
    try:
        block = memoryview(mmap.mmap(fd, _HEADER.unpack(header)[0]))
    finally:
        os.close(fd)
    return _read_block(block)


class _Pickler(pickle.Pickler):
    """Pickles tensors as raw bytes outside the stream, so that they are copied once."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        return _rebuild_tensor, (pickle.PickleBuffer(_raw_bytes(value)), value.dtype, tuple(value.shape))


def _raw_bytes(value: Tensor) -> memoryview:
    if not value.numel():
        return memoryview(b"")  # an empty tensor has arbitrary strides, and torch refuses to view some of them
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _rebuild_tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(raw).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def _write_block(value: Any) -> tuple[int, int]:
    """Layout: number of parts, their lengths, the pickle stream, the buffers; each part aligned."""
    buffers: list[pickle.PickleBuffer] = []
    stream = _Stream()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [memoryview(stream.data), *(buffer.raw() for buffer in buffers)]
    table = np.array([len(parts), *(part.nbytes for part in parts)], dtype=np.int64).tobytes()
    places, size = _places([len(table), *(part.nbytes for part in parts)])
    fd = _open_block(size)
    with mmap.mmap(fd, size) as block:
        for place, part in zip(places, [memoryview(table), *parts], strict=True):
            block[place : place + part.nbytes] = part
    return fd, size


def _read_block(block: memoryview) -> Any:
    number = int(np.frombuffer(block[:8], dtype=np.int64)[0])
    sizes = np.frombuffer(block[8 : 8 + 8 * number], dtype=np.int64).tolist()
    places, _ = _places([8 + 8 * number, *sizes])
    stream, *buffers = (block[at : at + size] for at, size in zip(places[1:], sizes, strict=True))
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - written by our own process


def _places(sizes: list[int]) -> tuple[list[int], int]:
    aligned = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    ends = np.cumsum(aligned).tolist()
    return [end - size for end, size in zip(ends, aligned, strict=True)], ends[-1]


class _Stream:
    """The minimal file object a pickler needs."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, part: Any) -> SupportsIndex:
        self.data += part
        return len(part)


def _open_block(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("truebatch", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(
                fd, 0, size
            )  # with no memory left this raises OSError; else the first write is a bus error
    except OSError:
        os.close(fd)
        raise
    return fd
