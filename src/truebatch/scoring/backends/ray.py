"""A backend as a Ray actor: it estimates costs, and scores what the actor pool could not.

Ray places an actor where its GPU is free. One that dies is replaced, and its batch is bisected like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest
from truebatch.scoring.backends.remote import RemoteBackend, WorkerCrash, WorkerHang
from truebatch.scoring.backends.worker import BackendService
from truebatch.scoring.spec import ScoreCall, open_one

SPARE_CPUS = 4
"""Logical CPUs of a local cluster beyond its workers: Ray's own readers need some, or everything stalls."""


class JudgeActor(BackendService):
    """What runs in an actor."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        super().__init__(lambda: open_one(ScoreCall(**call)))


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Resources and limits of an actor."""

    cpus: float = 1.0
    gpus: float = 0.0
    timeout: float = 600.0
    """Seconds for one batch."""
    start: float = 600.0
    """Seconds to say what the backend is, or to check and measure it."""


class RayBackend(RemoteBackend):
    """The backend that a call describes, in an actor."""

    def __init__(self, call: Mapping[str, Any], settings: RaySettings | None = None) -> None:
        how = settings or RaySettings()
        super().__init__(ActorTransport(call, how), timeout=how.timeout, start=how.start)

    def costs(self, samples: Sequence[ScoreRequest], /) -> list[Cost | SampleError]:
        """Computed by the actor for all samples at once."""
        return super().costs([located(sample) for sample in samples])

    def prepare(self, sample: ScoreRequest, /) -> ScoreRequest:
        """The sample with whole paths: it is decoded and prepared in the actor."""
        return located(sample)


class ActorTransport:
    """Method calls of an actor that Ray places where there is room."""

    def __init__(self, call: Mapping[str, Any], settings: RaySettings) -> None:
        self._call, self._settings = dict(call), settings
        self._ray: Any = ray_library()
        self.actor: Any = None

    def start(self) -> Mapping[str, Any]:
        """An actor that has opened its backend, or not; its place in the cluster may have to be waited for."""
        made = self._ray.remote(num_cpus=self._settings.cpus, num_gpus=self._settings.gpus)(JudgeActor)
        self.actor = made.remote(self._call)
        first: Mapping[str, Any] = self._ray.get(self.actor.greet.remote())
        return first

    def ask(self, request: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """What the actor answers; an error that it raises is raised here."""
        problems = self._ray.exceptions
        try:
            found: Mapping[str, Any] = self._ray.get(self.actor.answer.remote(dict(request)), timeout=timeout)
        except problems.GetTimeoutError as error:
            raise WorkerHang(f"no result within {timeout:g} s") from error
        except problems.RayActorError as error:
            raise WorkerCrash(str(error).splitlines()[0][:500]) from error
        except problems.RayTaskError as error:
            raise (error.cause or RuntimeError(str(error)[-500:])) from error
        return found

    def stop(self) -> None:
        """Kill the actor; its place in the cluster is free."""
        actor, self.actor = self.actor, None
        if actor is not None:
            self._ray.kill(actor)


def located(sample: ScoreRequest) -> ScoreRequest:
    """The sample with absolute image paths: an actor has its own working folder."""
    images = tuple(str(Path(one).resolve()) if isinstance(one, str) else one for one in sample.images)
    return replace(sample, images=images)


def ray_library(workers: int = 1) -> Any:
    """Connect to Ray: to an existing cluster (RAY_ADDRESS, or one on this machine), else to a new local one."""
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
        except ConnectionError:  # there is no cluster
            ray.init(num_cpus=workers + SPARE_CPUS, include_dashboard=False, **quiet)
    return ray
