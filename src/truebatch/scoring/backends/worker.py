"""What a worker runs, in a process or in an actor: the backend of a call, asked and answering in plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from truebatch.errors import ConfigError, TruebatchError
from truebatch.scoring.backends.interface import Backend, slower_ways
from truebatch.scoring.backends.protocol import pack_cost, pack_response, unpack_request
from truebatch.scoring.equality_check import check_identity, pack_report
from truebatch.scoring.memory_budget import budget_of
from truebatch.scoring.prefetch import attempt, judge_prepared
from truebatch.training.memory.oom import free_memory, is_out_of_memory

_THREADS = 4


class BackendService:
    """A backend that answers the requests of a `remote.RemoteBackend`, or why it cannot be opened."""

    def __init__(self, open_backend: Callable[[], Backend]) -> None:
        self._backend: Backend | None = None
        self._refused: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(_THREADS)
        try:
            self._backend = open_backend()
        except TruebatchError as error:  # a worker that raises while it is made looks like one that died
            self._refused = {"wrong": error.wrong, "seen": error.seen, "do": error.do}

    @property
    def backend(self) -> Backend:
        """The backend; raises if the call was rejected."""
        if self._backend is None:
            raise ConfigError(**self._refused)
        return self._backend

    def greet(self) -> dict[str, Any]:
        """The first message of a worker."""
        return {"refused": self._refused} if self._refused else {"ready": 1}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; what a batch raised is returned to the run, which cuts it."""
        backend = self.backend
        if request["do"] == "describe":
            return {"describe": dict(backend.describe())}
        if request["do"] == "slower":
            return {"slower": slower_ways(backend)}
        samples = [unpack_request(value) for value in request["samples"]]
        if request["do"] == "cost":
            return {"costs": [pack_cost(attempt(backend.cost, sample)) for sample in samples]}
        if request["do"] == "fit":
            return {"cells": budget_of(backend, samples)}
        if request["do"] == "check":
            report = check_identity(backend, samples, n=request["n"], tolerance=request["tolerance"])
            return {"report": pack_report(report)}
        prepared = list(self._threads.map(lambda sample: attempt(backend.prepare, sample), samples))
        try:
            return {"answers": [pack_response(answer) for answer in judge_prepared(backend, prepared)]}
        except Exception as error:  # a model may raise anything: the main process decides
            said, is_memory = f"{type(error).__name__}: {error}", is_out_of_memory(error)
        if is_memory:
            free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"), said=said)
        return {"error": said, "memory": is_memory}
