"""A backend in another process, on this machine or elsewhere: started on demand and replaced when it dies.

requests of plain values -> a transport (`subprocess`, `ray`) -> `worker.BackendService` -> answers of plain values
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.backends.protocol import pack_request, unpack_cost, unpack_response
from truebatch.scoring.equality_check import IdentityReport, choose_samples, unpack_report


class WorkerCrash(RuntimeError):  # noqa: N818 (the name under which it is counted)
    """The worker ended while it judged."""


class WorkerHang(RuntimeError):  # noqa: N818
    """The worker gave no answer in time, or no heartbeat."""


class Transport(Protocol):
    """One worker at a time, and the way to it."""

    def start(self) -> Mapping[str, Any]:
        """Start a worker. What it says first: `refused`, with the three parts of an error, if it cannot serve."""

    def ask(self, request: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """The worker's answer; raises `WorkerCrash` or `WorkerHang`."""

    def stop(self) -> None:
        """End the worker, if there is one."""


class RemoteBackend:
    """A backend behind a transport: judged by a worker whose death or silence is reported, never waited for."""

    def __init__(self, transport: Transport, *, timeout: float, start: float) -> None:
        self.transport = transport
        self._timeout, self._start = timeout, start
        self._is_started = False
        self._lock = threading.Lock()
        self.starts = 0
        """How often a worker was started."""
        self._slower: dict[str, None] = {}

    def describe(self) -> Mapping[str, Any]:
        """The fingerprint of the worker's backend."""
        try:
            found: Mapping[str, Any] = self._ask({"do": "describe"}, self._start)["describe"]
        except (WorkerCrash, WorkerHang) as error:  # no sample is at fault
            raise ConfigError("a worker failed", seen=str(error)[:400], do="see its message") from error
        return found

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """Computed by the worker; see `costs` for many."""
        (found,) = self.costs([sample])
        if isinstance(found, SampleError):
            raise found
        return found

    def costs(self, samples: Sequence[ScoreRequest], /) -> list[Cost | SampleError]:
        """Computed by the worker for all samples at once."""
        return [unpack_cost(one) for one in self._ask(_request("cost", samples), self._timeout)["costs"]]

    def prepare(self, sample: ScoreRequest, /) -> ScoreRequest:
        """The sample itself: it is decoded and prepared in the worker."""
        return sample

    def judge(self, prepared: Sequence[ScoreRequest], /) -> Sequence[ScoreResponse | SampleError]:
        """The worker's results. A worker that dies or hangs is replaced; a single sample is first retried once."""
        request = _request("judge", prepared)
        try:
            found = self._ask(request, self._timeout)
        except WorkerCrash:
            if len(prepared) > 1:
                raise
            found = self._ask(request, self._timeout)
        if "error" in found:
            raise (MemoryError if found["memory"] else RuntimeError)(found["error"])
        if len(found["answers"]) != len(prepared):
            raise RuntimeError(f"the worker returned {len(found['answers'])} results for {len(prepared)} samples")
        return [unpack_response(answer) for answer in found["answers"]]

    def check(self, samples: Sequence[ScoreRequest], n: int, tolerance: float | None) -> IdentityReport:
        """`check_identity` in the worker; samples that kill it are left out and will be recorded as failures."""
        chosen = [self.prepare(sample) for sample in choose_samples(self, samples, n)]
        try:
            return self._checked(chosen, n, tolerance)
        except (WorkerCrash, WorkerHang):
            return self._checked([one for one in chosen if self._survives(one)], n, tolerance)

    def fit(self, samples: Sequence[ScoreRequest]) -> int | None:
        """`fit_cells` in the worker."""
        request = _request("fit", [self.prepare(sample) for sample in samples])
        found: int | None = self._ask(request, self._start)["cells"]
        return found

    def slower_ways(self) -> list[str]:
        """Quick ways that the model was found not to allow, as its workers said."""
        with self._lock:
            if self._is_started:
                with suppress(WorkerCrash, WorkerHang):  # it is no more needed, and what it judged is kept
                    self.note_slower(self.transport.ask({"do": "slower"}, self._timeout)["slower"])
        return list(self._slower)

    def note_slower(self, lines: Iterable[str]) -> None:
        """Take in what another worker of the same call has found."""
        self._slower.update(dict.fromkeys(lines))

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end()

    def _checked(self, chosen: Sequence[ScoreRequest], n: int, tolerance: float | None) -> IdentityReport:
        request = {**_request("check", chosen), "n": n, "tolerance": tolerance}
        return unpack_report(self._ask(request, self._start)["report"])

    def _survives(self, sample: ScoreRequest) -> bool:
        try:
            self.judge([sample])
        except (WorkerCrash, WorkerHang):
            return False
        except Exception:  # an error does not mean the worker died
            return True
        return True

    def _ask(self, request: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        with self._lock:
            if not self._is_started:
                self._begin()
            try:
                return self.transport.ask(request, timeout)
            except (WorkerCrash, WorkerHang):
                self._end()
                raise

    def _begin(self) -> None:
        self.starts += 1
        try:
            first = self.transport.start()
        except BaseException:
            self._end()
            raise
        if "refused" in first:
            self._end()
            raise ConfigError(**first["refused"])
        self._is_started = True

    def _end(self) -> None:
        self._is_started = False
        self.transport.stop()


def _request(do: str, samples: Sequence[ScoreRequest]) -> dict[str, Any]:
    return {"do": do, "samples": [pack_request(sample) for sample in samples]}
