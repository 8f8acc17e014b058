"""The other end of `subprocess`: reads a call and requests from stdin, answers on stdout, beats while it works."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import torch

from truebatch.errors import TruebatchError
from truebatch.interrupts import leave_signals_to_parent
from truebatch.scoring.backends.interface import Backend
from truebatch.scoring.backends.protocol import decode, encode, pack_answer, pack_cost, unpack_asked
from truebatch.scoring.backends.transformers import ModelBackend
from truebatch.scoring.equality_check import check_identity, pack_report
from truebatch.scoring.memory_budget import fit_cells
from truebatch.scoring.prefetch import attempt, judge_prepared
from truebatch.scoring.spec import ScoreCall, open_one
from truebatch.training.memory.oom import free_memory, is_out_of_memory

BEAT_SECONDS = 1.0
_THREADS = 4


class _Voice:
    """The only one who writes to the real stdout; what models print goes to stderr."""

    def __init__(self) -> None:
        self._file: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def say(self, value: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(encode(value))
            self._file.flush()

    def beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.say({"beat": 1})
            except OSError:  # nobody listens: the run is gone, whatever this process is doing
                os._exit(1)


def main() -> int:
    """Serve the backend of a `ScoreCall` until stdin ends."""
    return serve(lambda call: open_one(ScoreCall(**call)))


def serve(open_call: Callable[[dict[str, Any]], Backend]) -> int:
    """Serve the backend that is opened from the first line of stdin, until stdin ends."""
    leave_signals_to_parent()
    voice = _Voice()
    threading.Thread(target=voice.beat, daemon=True).start()
    try:
        backend = open_call(decode(sys.stdin.buffer.readline()))
    except TruebatchError as error:
        voice.say({"refused": {"wrong": error.wrong, "seen": error.seen, "do": error.do}})
        return 2
    voice.say({"ready": 1})
    with ThreadPoolExecutor(_THREADS) as pool:
        for line in sys.stdin.buffer:
            request = decode(line)
            voice.say({**_answer(backend, request, pool), "number": request["number"]})
    return 0


def _answer(backend: Backend, request: Mapping[str, Any], pool: ThreadPoolExecutor) -> dict[str, Any]:
    if request["do"] == "describe":
        return {"describe": dict(backend.describe())}
    samples = [unpack_asked(value) for value in request["samples"]]
    if request["do"] == "cost":
        return {"costs": [pack_cost(attempt(backend.cost, sample)) for sample in samples]}
    if request["do"] == "fit":
        return {"cells": fit_cells(backend, samples) if isinstance(backend, ModelBackend) else None}
    if request["do"] == "check":
        report = check_identity(backend, samples, n=request["n"], tolerance=request["tolerance"])
        return {"report": pack_report(report)}
    prepared = list(pool.map(lambda sample: attempt(backend.prepare, sample), samples))
    try:
        return {"answers": [pack_answer(answer) for answer in judge_prepared(backend, prepared)]}
    except Exception as error:  # told to the run, which cuts the batch
        said, is_memory = f"{type(error).__name__}: {error}", is_out_of_memory(error)
    if is_memory:
        free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"), said=said)
    return {"error": said, "memory": is_memory}


if __name__ == "__main__":
    sys.exit(main())
