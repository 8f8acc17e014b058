"""The engine for more than one machine: backends as actors of a Ray cluster, results in the journal of the one who asks.

Ray places an actor where its GPU is free. One that dies is replaced by a fresh one, and its batch is cut as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any

from truebatch.errors import ConfigError
from truebatch.scoring.ahead import attempt
from truebatch.scoring.backend import Answer, Asked, Backend, Cost, SampleError
from truebatch.scoring.calling import ScoreCall, open_one
from truebatch.scoring.wire import pack_answer, pack_asked, pack_cost, unpack_answer, unpack_asked
from truebatch.scoring.worker import WorkerCrash, WorkerHang


class Judge:
    """What runs in an actor: the backend of a call, spoken to in plain values."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self._backend = open_one(ScoreCall(**call))

    def describe(self) -> dict[str, Any]:
        """Of the backend."""
        return dict(self._backend.describe())

    def cost(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A cost, or why there is none."""
        return pack_cost(attempt(self._backend.cost, unpack_asked(sample)))

    def judge(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answers for all samples."""
        prepared = [attempt(self._backend.prepare, unpack_asked(sample)) for sample in samples]
        good = [one for one in prepared if not isinstance(one, SampleError)]
        answers = iter(self._backend.judge(good) if good else [])
        return [pack_answer(one if isinstance(one, SampleError) else next(answers)) for one in prepared]


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
        self._ray: Any = _library()
        self._actor: Any = None
        self._lock = Lock()
        self.starts = 0
        """How often an actor was started."""

    def describe(self) -> Mapping[str, Any]:
        """What the backend in the actor says of itself."""
        found: Mapping[str, Any] = self._ask("describe")
        return found

    def cost(self, sample: Asked, /) -> Cost:
        """Asked of the actor."""
        found = self._ask("cost", pack_asked(sample))
        if "stage" in found:
            raise SampleError(found["stage"], found["kind"], found["message"], found["output"])
        return Cost(**found)

    def prepare(self, sample: Asked, /) -> Asked:
        """The sample itself: it is decoded and prepared in the actor."""
        return sample

    def judge(self, prepared: Sequence[Asked], /) -> Sequence[Answer | SampleError]:
        """The actor's answers; a single sample is tried a second time when the actor dies."""
        request = [pack_asked(sample) for sample in prepared]
        try:
            found = self._ask("judge", request)
        except WorkerCrash:
            if len(prepared) > 1:
                raise
            found = self._ask("judge", request)
        return [unpack_answer(answer) for answer in found]

    def close(self) -> None:
        """End the actor."""
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
        made = self._ray.remote(num_cpus=self._settings.cpus, num_gpus=self._settings.gpus)(Judge)
        self._actor = made.remote(self._call)
        self.starts += 1
        return self._actor

    def _end(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)


def open_actors(call: ScoreCall) -> list[Backend]:
    """As many actors as the call has workers, each with a GPU where the cluster has any."""
    ray = _library()
    gpus = 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 and call.device != "cpu" else 0.0
    settings = RaySettings(gpus=gpus, timeout=call.timeout)
    return [RayBackend(call.to_dict(), settings) for _ in range(call.workers)]


def _library() -> Any:
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "the engine ray needs the package ray", seen=str(error), do="pip install 'truebatch[ray]'"
        ) from error
    if not ray.is_initialized():
        ray.init(logging_level="ERROR", log_to_driver=False)
    return ray
