"""A backend in a separate process: it may crash or hang, run in another environment, or on its own GPU.

request -> the worker's stdin; heartbeats and the result <- its stdout. A silent or dead worker is killed and replaced.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from truebatch.errors import ConfigError
from truebatch.scoring.backends.protocol import decode, encode
from truebatch.scoring.backends.remote import RemoteBackend, WorkerCrash, WorkerHang

MODULE = "truebatch.scoring.backends.subprocess_main"
_TAIL = 600
_LAST_SECONDS = 5.0
"""Seconds a worker has to exit after closing its stdout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """How a worker is run."""

    python: str = sys.executable
    """The Python interpreter; another environment has its own."""
    module: str = MODULE
    """The program; one from another environment may use the same protocol."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of this process's, such as CUDA_VISIBLE_DEVICES."""
    timeout: float = 600.0
    """Seconds for one batch."""
    silence: float = 60.0
    """Seconds without a heartbeat after which a worker counts as hung; it sends one every second."""
    start: float = 600.0
    """Seconds to load the model."""


class WorkerBackend(RemoteBackend):
    """The backend that a call describes, in a process of its own."""

    def __init__(self, call: Mapping[str, Any], settings: WorkerSettings | None = None) -> None:
        how = settings or WorkerSettings()
        super().__init__(ProcessTransport(call, how), timeout=how.timeout, start=how.start)


class ProcessTransport:
    """Lines of JSON to the stdin of a process and from its stdout."""

    def __init__(self, call: Mapping[str, Any], settings: WorkerSettings) -> None:
        self._call, self._settings = dict(call), settings
        self.process: subprocess.Popen[bytes] | None = None
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors: IO[bytes] | None = None
        self._asked = 0
        """Requests so far: a result with another number is not the expected one."""

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer with the number of this request."""
        assert self.process is not None
        self._asked += 1
        _send(self.process, {**request, "number": self._asked})
        return self._wait(self.process, timeout, WorkerCrash)

    def start(self) -> dict[str, Any]:
        """A process that has read the call, and opened its backend or not."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [self._settings.python, "-m", self._settings.module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **self._settings.environment},
            start_new_session=True,  # Ctrl-C in the terminal is for the run, which stops its workers itself
        )  # fmt: skip
        self.process, self._said = process, queue.Queue()
        threading.Thread(target=_listen, args=(process.stdout, self._said), daemon=True).start()
        _send(process, self._call)
        return self._wait(process, self._settings.start, _NoStart)

    def _wait(self, process: subprocess.Popen[bytes], timeout: float, kind: type[Exception]) -> dict[str, Any]:
        until = time.monotonic() + timeout
        silence = (
            timeout if kind is _NoStart else self._settings.silence
        )  # heartbeats start once its libraries are imported
        while True:
            left = until - time.monotonic()
            try:
                said = self._said.get(timeout=max(0.0, min(left, silence)))
            except queue.Empty:
                raise WorkerHang(f"no result within {timeout:g} s" if left <= silence else "no heartbeat") from None
            if said is None:
                code = _end_of(process)
                tail = self._tail()
                if kind is _NoStart:
                    raise ConfigError("a worker does not start", seen=f"exit code {code}: {tail}", do="see its message")
                raise kind(f"the worker ended with {_ending(code)}: {tail}")
            if "beat" not in said and said.get("number", self._asked) == self._asked:
                return said
            if left <= 0:
                raise WorkerHang(f"no result within {timeout:g} s")

    def _tail(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL))
        return self._errors.read().decode("utf-8", "replace").strip()

    def stop(self) -> None:
        """Stop the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._errors):
                _close(pipe)


class _NoStart(Exception):  # noqa: N818
    """Marks a worker that is not ready yet."""


def _send(process: subprocess.Popen[bytes], value: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(encode(value))
        process.stdin.flush()
    except OSError:  # it has ended; whoever waits for its answer reports that
        pass


def _listen(stdout: IO[bytes] | None, said: queue.Queue[dict[str, Any] | None]) -> None:
    assert stdout is not None
    try:
        for line in stdout:
            found = _message(line)
            if found is not None:
                said.put(found)
    except ValueError:  # the pipe was closed
        pass
    said.put(None)


def _message(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not a message: other code may print, and a dying process may truncate a line."""
    try:
        found: object = decode(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a worker that closed its stdout; one that is still running without it is killed."""
    try:
        return process.wait(timeout=_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:  # unsent data is of no use to a dead process
        pass


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
