"""The engine for more than one machine: planned batches through a pool of Ray Data actors, results into one journal.

batches -> ray.data, one a block -> map_batches over stateful actors -> outcomes, as they come -> the journal here
A batch whose actor dies twice comes back without an answer; it is cut in a fresh actor until the cause has a name.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import ScoreRequest, slower_ways
from truebatch.scoring.backends.protocol import (
    decode,
    encode,
    pack_outcome,
    pack_request,
    unpack_outcome,
    unpack_request,
)
from truebatch.scoring.backends.ray import JudgeActor, RayBackend, RaySettings, located, ray_library
from truebatch.scoring.bisect import FailureStats, judge_ready
from truebatch.scoring.prefetch import attempt
from truebatch.scoring.resume import Work
from truebatch.scoring.runner import JudgedBatch
from truebatch.scoring.spec import ScoreCall

RETRIES = 1
"""Deaths of its actor after which a batch is tried once more, whole."""
HUNG = 42
"""The exit code of an actor whose batch took too long."""


class JudgeBatches:
    """What runs in every actor of the pool: a batch in, its outcomes out, both as bytes of JSON."""

    def __init__(self, call: Mapping[str, Any], timeout: float) -> None:
        self._judge, self._timeout = JudgeActor(call), timeout

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """One answer for every batch of a block."""
        with _limited(self._timeout):
            return {"done": [encode(self._one(decode(bytes(request)))) for request in rows["request"]]}

    def _one(self, request: Mapping[str, Any]) -> dict[str, Any]:
        began, trouble = time.monotonic(), FailureStats()
        try:
            backend = self._judge.backend
            samples = [attempt(backend.prepare, unpack_request(sample)) for sample in request["samples"]]
            ready = list(zip(request["keys"], samples, request["lengths"], strict=True))
            outcomes = judge_ready(backend.judge, ready, trouble, attempts=request["attempt"])
        except ConfigError as error:
            return {"refused": {"wrong": error.wrong, "seen": error.seen, "do": error.do}}
        return {
            "number": request["number"], "keys": request["keys"], "attempt": request["attempt"],
            "outcomes": [pack_outcome(one) for one in outcomes], "seconds": time.monotonic() - began,
            "trouble": asdict(trouble), "slower": slower_ways(backend),
        }  # fmt: skip


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ray Data waits for a task for ever: an actor that hangs ends itself, and a fresh one comes."""
    timer = Timer(seconds, os._exit, (HUNG,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class RayEngine:
    """Judges batches in a pool of actors. `backend` is for what the pool loses; its place is given back meanwhile."""

    call: Mapping[str, Any]
    workers: int
    settings: RaySettings
    backend: RayBackend

    def __call__(
        self, work: Sequence[Work], asked: Mapping[str, ScoreRequest], lengths: Mapping[str, int]
    ) -> Iterator[JudgedBatch]:
        """Every batch once, as they come from the pool; then those it lost, cut until all is judged or named."""
        self.backend.close()
        left = {(one.number, one.keys): one for one in work}
        for answer in self._pool([_request(one, asked, lengths) for one in work]) if work else ():
            if "refused" in answer:
                raise ConfigError(**answer["refused"])
            self.backend.note_slower(answer["slower"])
            one = left.pop((answer["number"], tuple(answer["keys"])))
            outcomes = [unpack_outcome(outcome) for outcome in answer["outcomes"]]
            yield JudgedBatch(one, outcomes, answer["seconds"], FailureStats(**answer["trouble"]))
        for one in left.values():
            yield self._alone(one, asked, lengths)

    def _pool(self, requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Answers of the pool in any order; a batch whose actor dies again and again has none."""
        ray_library(self.workers)
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # a lost batch is judged below and not news
        data: Any = import_module("ray.data")
        blocks = data.from_items([{"request": encode(one)} for one in requests], override_num_blocks=len(requests))
        done = blocks.map_batches(
            JudgeBatches, batch_size=1, fn_constructor_args=(dict(self.call), self.settings.timeout),
            compute=data.ActorPoolStrategy(size=self.workers, max_tasks_in_flight_per_actor=2),
            num_cpus=self.settings.cpus, num_gpus=self.settings.gpus or None, max_restarts=-1,
            max_task_retries=RETRIES,
        )  # fmt: skip
        done.context.max_errored_blocks = -1  # a batch without an answer is our matter, not the end of all others
        done.context.enable_progress_bars = False
        for row in done.iter_rows():
            yield decode(bytes(row["done"]))

    def _alone(self, one: Work, asked: Mapping[str, ScoreRequest], lengths: Mapping[str, int]) -> JudgedBatch:
        began, trouble = time.monotonic(), FailureStats()
        ready = [(key, attempt(self.backend.prepare, asked[key]), lengths.get(key, 0)) for key in one.keys]
        outcomes = judge_ready(self.backend.judge, ready, trouble, attempts=one.attempt + RETRIES + 1)
        return JudgedBatch(one, outcomes, time.monotonic() - began, trouble)


def ray_engine(call: ScoreCall) -> RayEngine:
    """The engine of a call with as many actors as it has workers, each with a GPU where the cluster has any.

    Every machine needs truebatch, the model folder and the images at the same paths.
    """
    ray = ray_library(call.workers)
    there = int(ray.cluster_resources().get("GPU", 0))
    gpus = 1.0 if there and call.device != "cpu" else 0.0
    if gpus and call.workers > there:
        raise ConfigError(
            "there are fewer GPUs than processes that need one",
            seen=f"--workers {call.workers}; {there} GPU(s) in the Ray cluster",
            do=f"ask for at most {there}, or start Ray on more machines",
        )
    settings = RaySettings(gpus=gpus, timeout=call.timeout)
    folder = Path(call.model)
    values = replace(call, model=str(folder.resolve()) if folder.is_dir() else call.model).to_dict()
    return RayEngine(values, call.workers, settings, RayBackend(values, settings))


def _request(one: Work, asked: Mapping[str, ScoreRequest], lengths: Mapping[str, int]) -> dict[str, Any]:
    return {
        "number": one.number, "keys": list(one.keys), "attempt": one.attempt,
        "samples": [pack_request(located(asked[key])) for key in one.keys],
        "lengths": [lengths.get(key, 0) for key in one.keys],
    }  # fmt: skip
