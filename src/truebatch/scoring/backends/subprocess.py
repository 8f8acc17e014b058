"""A backend in a process of its own: it may crash or hang, run in another environment, or on a GPU of its own.

request -> the worker's stdin; beats and the answer <- its stdout. Silent or gone: it is killed, and a fresh one comes.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.backends.protocol import decode, encode, pack_asked, unpack_answer, unpack_cost
from truebatch.scoring.equality_check import IdentityReport, choose_samples, unpack_report

MODULE = "truebatch.scoring.backends.subprocess_main"
_TAIL = 600
_LAST_SECONDS = 5.0
"""That a worker has to end after its stdout has."""


class WorkerCrash(RuntimeError):  # noqa: N818 (what happened, as it is counted)
    """The worker process ended while it judged."""


class WorkerHang(RuntimeError):  # noqa: N818
    """The worker process gave no answer in time, or no sign of life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """How a worker is run."""

    python: str = sys.executable
    """The interpreter: another environment has its own."""
    module: str = MODULE
    """What it runs; a program of another environment may speak the same lines."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of this process's, such as CUDA_VISIBLE_DEVICES."""
    timeout: float = 600.0
    """Seconds for one batch."""
    silence: float = 60.0
    """Seconds without a beat after which a worker counts as hung; a beat comes every second."""
    start: float = 600.0
    """Seconds to load the model."""


class WorkerBackend:
    """The backend that a call describes, in a process of its own that is started when it is needed."""

    def __init__(self, call: Mapping[str, Any], settings: WorkerSettings | None = None) -> None:
        self._call, self._settings = dict(call), settings or WorkerSettings()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._asked = 0
        """Requests so far: an answer with another number is not the one that is waited for."""
        self.starts = 0
        """How often a process was started."""

    def describe(self) -> Mapping[str, Any]:
        """What the backend in the worker says of itself."""
        try:
            found: Mapping[str, Any] = self._ask({"do": "describe"}, self._settings.start)["describe"]
        except (WorkerCrash, WorkerHang) as error:  # no sample is to blame for it
            raise ConfigError("a worker does not work", seen=str(error)[:400], do="see its message") from error
        return found

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """Asked of the worker; see `costs` for many."""
        (found,) = self.costs([sample])
        if isinstance(found, SampleError):
            raise found
        return found

    def costs(self, samples: Sequence[ScoreRequest], /) -> list[Cost | SampleError]:
        """Asked of the worker for all samples at once."""
        request = {"do": "cost", "samples": [pack_asked(sample) for sample in samples]}
        return [unpack_cost(one) for one in self._ask(request, self._settings.timeout)["costs"]]

    def prepare(self, sample: ScoreRequest, /) -> ScoreRequest:
        """The sample itself: it is decoded and prepared in the worker."""
        return sample

    def judge(self, prepared: Sequence[ScoreRequest], /) -> Sequence[ScoreResponse | SampleError]:
        """The worker's answers. One that ends or hangs is replaced; a single sample is tried a second time first."""
        request = {"do": "judge", "samples": [pack_asked(sample) for sample in prepared]}
        try:
            found = self._ask(request, self._settings.timeout)
        except WorkerCrash:
            if len(prepared) > 1:
                raise
            found = self._ask(request, self._settings.timeout)
        if "error" in found:
            raise (MemoryError if found["memory"] else RuntimeError)(found["error"])
        if len(found["answers"]) != len(prepared):
            raise RuntimeError(f"the worker gave {len(found['answers'])} answers for {len(prepared)} samples")
        return [unpack_answer(answer) for answer in found["answers"]]

    def check(self, samples: Sequence[ScoreRequest], n: int, tolerance: float | None) -> IdentityReport:
        """`check_identity` where the model is; samples that end the worker are left out, they will be records."""
        chosen = choose_samples(self, samples, n)
        try:
            return self._checked(chosen, n, tolerance)
        except (WorkerCrash, WorkerHang):
            return self._checked([one for one in chosen if self._survives(one)], n, tolerance)

    def fit(self, samples: Sequence[ScoreRequest]) -> int | None:
        """`fit_cells` where the model is."""
        request = {"do": "fit", "samples": [pack_asked(sample) for sample in samples]}
        found: int | None = self._ask(request, self._settings.start)["cells"]
        return found

    def _checked(self, chosen: Sequence[ScoreRequest], n: int, tolerance: float | None) -> IdentityReport:
        request = {"do": "check", "samples": [pack_asked(one) for one in chosen], "n": n, "tolerance": tolerance}
        return unpack_report(self._ask(request, self._settings.start)["report"])

    def _survives(self, sample: ScoreRequest) -> bool:
        try:
            self.judge([sample])
        except (WorkerCrash, WorkerHang):
            return False
        except Exception:  # an error is not a death
            return True
        return True

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        with self._lock:
            process = self._process or self._begin()
            self._asked += 1
            try:
                assert process.stdin is not None
                process.stdin.write(encode({**request, "number": self._asked}))
                process.stdin.flush()
            except OSError:  # it has ended; what it left is told below
                pass
            return self._wait(process, timeout, WorkerCrash)

    def _begin(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [self._settings.python, "-m", self._settings.module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **self._settings.environment},
            start_new_session=True,  # a Ctrl-C of the terminal is for the run, which ends its workers itself
        )  # fmt: skip
        self._process, self._said = process, queue.Queue()
        self.starts += 1
        threading.Thread(target=_listen, args=(process.stdout, self._said), daemon=True).start()
        assert process.stdin is not None
        try:
            process.stdin.write(encode(self._call))
            process.stdin.flush()
        except OSError:  # it has ended; what it left is told below
            pass
        answer = self._wait(process, self._settings.start, _NoStart)
        if "refused" in answer:
            self._end()
            raise ConfigError(**answer["refused"])
        return process

    def _wait(self, process: subprocess.Popen[bytes], timeout: float, kind: type[Exception]) -> dict[str, Any]:
        until = time.monotonic() + timeout
        silence = timeout if kind is _NoStart else self._settings.silence  # it beats once its libraries are there
        while True:
            left = until - time.monotonic()
            try:
                said = self._said.get(timeout=max(0.0, min(left, silence)))
            except queue.Empty:
                why = f"no answer in {timeout:g} s" if left <= silence else "no sign of life"
                self._end()
                raise WorkerHang(why) from None
            if said is None:
                code = _end_of(process)
                tail = self._tail()
                self._end()
                if kind is _NoStart:
                    raise ConfigError("a worker does not start", seen=f"exit code {code}: {tail}", do="see its message")
                raise kind(f"the worker ended with {_ending(code)}: {tail}")
            if "beat" not in said and said.get("number", self._asked) == self._asked:
                return said
            if left <= 0:
                self._end()
                raise WorkerHang(f"no answer in {timeout:g} s")

    def _tail(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL))
        return self._errors.read().decode("utf-8", "replace").strip()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._errors):
                _close(pipe)


class _NoStart(Exception):  # noqa: N818
    """Marks the time before a worker is ready."""


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
    """None for what is no message: a program of others may print, and the end of a process may cut a line off."""
    try:
        found: object = decode(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a worker that closed its stdout; one that lives on without it is of no use."""
    try:
        return process.wait(timeout=_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:  # what was not sent is of no use to a process that has ended
        pass


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
