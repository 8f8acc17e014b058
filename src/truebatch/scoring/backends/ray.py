"""A backend as an actor of a Ray cluster: it says what samples cost, and judges what a pool of others could not.

Ray places an actor where its GPU is free. One that dies is replaced by a fresh one, and its batch is cut as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from truebatch.errors import ConfigError, TruebatchError
from truebatch.scoring.backends.interface import Backend, Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.backends.protocol import (
    pack_answer,
    pack_asked,
    pack_cost,
    unpack_answer,
    unpack_asked,
    unpack_cost,
)
from truebatch.scoring.backends.subprocess import WorkerCrash, WorkerHang
from truebatch.scoring.backends.transformers import ModelBackend
from truebatch.scoring.equality_check import IdentityReport, check_identity, choose_samples, pack_report, unpack_report
from truebatch.scoring.memory_budget import fit_cells
from truebatch.scoring.prefetch import attempt, judge_prepared
from truebatch.scoring.spec import ScoreCall, open_one

SPARE_CPUS = 4
"""Logical CPUs of a cluster on this machine beyond its workers: Ray's own readers need some, or all stand still."""


class JudgeActor:
    """What runs in an actor: the backend of a call, spoken to in plain values."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self._backend: Backend | None = None
        self.refused: dict[str, str] = {}
        try:
            self._backend = open_one(ScoreCall(**call))
        except TruebatchError as error:  # an actor that raises while it is made looks like one that died
            self.refused = {"wrong": error.wrong, "seen": error.seen, "do": error.do}

    @property
    def backend(self) -> Backend:
        """The backend; what it was refused for is raised."""
        if self._backend is None:
            raise ConfigError(**self.refused)
        return self._backend

    def ready(self) -> dict[str, str]:
        """Why the call was refused; empty if it was not."""
        return self.refused

    def describe(self) -> dict[str, Any]:
        """Of the backend."""
        return dict(self.backend.describe())

    def costs(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A cost for each sample, or why there is none."""
        return [pack_cost(attempt(self.backend.cost, unpack_asked(sample))) for sample in samples]

    def check(self, samples: Sequence[Mapping[str, Any]], n: int, tolerance: float | None) -> dict[str, Any]:
        """A report as plain values."""
        asked = [unpack_asked(sample) for sample in samples]
        return pack_report(check_identity(self.backend, asked, n=n, tolerance=tolerance))

    def fit(self, samples: Sequence[Mapping[str, Any]]) -> int | None:
        """The largest safe budget where it can be measured."""
        asked = [unpack_asked(sample) for sample in samples]
        return fit_cells(self.backend, asked) if isinstance(self.backend, ModelBackend) else None

    def judge(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answers for all samples."""
        prepared = [attempt(self.backend.prepare, unpack_asked(sample)) for sample in samples]
        return [pack_answer(answer) for answer in judge_prepared(self.backend, prepared)]


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What an actor takes of the cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    timeout: float = 600.0
    """Seconds for one batch."""


class RayBackend:
    """An actor that is started when it is needed, and again when it is gone."""

    def __init__(self, call: Mapping[str, Any], settings: RaySettings | None = None) -> None:
        self._call, self._settings = dict(call), settings or RaySettings()
        self._ray: Any = ray_library()
        self._actor: Any = None
        self._lock = Lock()
        self.starts = 0
        """How often an actor was started."""

    def describe(self) -> Mapping[str, Any]:
        """What the backend in the actor says of itself."""
        found: Mapping[str, Any] = self._ask("describe")
        return found

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """Asked of the actor; see `costs` for many."""
        (found,) = self.costs([sample])
        if isinstance(found, SampleError):
            raise found
        return found

    def costs(self, samples: Sequence[ScoreRequest], /) -> list[Cost | SampleError]:
        """Asked of the actor for all samples at once."""
        return [unpack_cost(one) for one in self._ask("costs", [pack_asked(located(one)) for one in samples])]

    def prepare(self, sample: ScoreRequest, /) -> ScoreRequest:
        """The sample itself: it is decoded and prepared in the actor."""
        return located(sample)

    def judge(self, prepared: Sequence[ScoreRequest], /) -> Sequence[ScoreResponse | SampleError]:
        """The actor's answers; a single sample is tried a second time when the actor dies."""
        request = [pack_asked(sample) for sample in prepared]
        try:
            found = self._ask("judge", request)
        except WorkerCrash:
            if len(prepared) > 1:
                raise
            found = self._ask("judge", request)
        return [unpack_answer(answer) for answer in found]

    def check(self, samples: Sequence[ScoreRequest], n: int, tolerance: float | None) -> IdentityReport:
        """`check_identity` in the actor; samples that end it are left out, they will be records."""
        chosen = [pack_asked(located(one)) for one in choose_samples(self, samples, n)]
        try:
            return unpack_report(self._ask("check", chosen, n, tolerance))
        except (WorkerCrash, WorkerHang):
            alive = [one for one in chosen if self._survives(one)]
            return unpack_report(self._ask("check", alive, n, tolerance))

    def fit(self, samples: Sequence[ScoreRequest]) -> int | None:
        """`fit_cells` in the actor."""
        found: int | None = self._ask("fit", [pack_asked(located(one)) for one in samples])
        return found

    def _survives(self, sample: Mapping[str, Any]) -> bool:
        try:
            self._ask("judge", [sample])
        except (WorkerCrash, WorkerHang):
            return False
        except Exception:  # an error is not a death
            return True
        return True

    def close(self) -> None:
        """End the actor; its place in the cluster is free."""
        with self._lock:
            self._end()

    def _ask(self, name: str, *given: Any) -> Any:
        with self._lock:
            actor = self._actor or self._begin()
            try:
                return self._ray.get(getattr(actor, name).remote(*given), timeout=self._settings.timeout)
            except self._ray.exceptions.GetTimeoutError as error:
                self._end()
                raise WorkerHang(f"no answer in {self._settings.timeout:g} s") from error
            except self._ray.exceptions.RayActorError as error:
                self._end()
                raise WorkerCrash(str(error).splitlines()[0][:500]) from error
            except self._ray.exceptions.RayTaskError as error:
                raise (error.cause or RuntimeError(str(error)[-500:])) from error

    def _begin(self) -> Any:
        made = self._ray.remote(num_cpus=self._settings.cpus, num_gpus=self._settings.gpus)(JudgeActor)
        self._actor = made.remote(self._call)
        self.starts += 1
        refused = self._ray.get(self._actor.ready.remote())
        if refused:
            self._end()
            raise ConfigError(**refused)
        return self._actor

    def _end(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)


def located(sample: ScoreRequest) -> ScoreRequest:
    """The sample with whole paths of its images: an actor has a working folder of its own."""
    images = tuple(str(Path(one).resolve()) if isinstance(one, str) else one for one in sample.images)
    return replace(sample, images=images)


def ray_library(workers: int = 1) -> Any:
    """Ray, connected: to the cluster that is there (RAY_ADDRESS, or one on this machine), else to one of our own."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "the engine ray needs the package ray", seen=str(error), do="pip install 'truebatch[ray]'"
        ) from error
    if not ray.is_initialized():
        quiet = {"logging_level": "ERROR", "log_to_driver": False}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:  # no cluster is there
            ray.init(num_cpus=workers + SPARE_CPUS, include_dashboard=False, **quiet)
    return ray
