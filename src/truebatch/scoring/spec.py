"""A call of the scoring room as plain values: kept in the run folder, sent to workers, made again by `run retry`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from truebatch.errors import ConfigError, RunError
from truebatch.generation.config import Generation
from truebatch.io.atomic_files import corrupt_file_errors, read_json, write_json
from truebatch.progress import stage
from truebatch.scoring.backends.http.address import find_key, is_address
from truebatch.scoring.backends.http.client import HttpSettings
from truebatch.scoring.backends.http.openai import HttpBackend
from truebatch.scoring.backends.interface import Backend
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.backends.subprocess import WorkerBackend, WorkerSettings
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.readouts import Generate, Head, Labels, Readout, Words, YesNo
from truebatch.scoring.readouts.scale import parse_scale
from truebatch.scoring.store.manifest import CALL
from truebatch.visible_gpus import gpu_environments

SCRIPTED = "scripted"
"""The name of a model that is none: it plays what samples ask for."""
HTTP = HttpSettings()
"""How a server is asked where nothing else is said."""
PARSERS = ("number",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreCall:
    """Everything a run is made from."""

    data: str = ""
    model: str
    """A model folder, http://HOST/v1, or `scripted`."""
    served: str = ""
    """The model's name at that address."""
    readout: Mapping[str, Any] = field(default_factory=lambda: {"kind": "yesno"})
    limits: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    reuse: bool = True
    compiled: bool = False
    """Compile the layers that read prompts."""
    workers: int = 0
    """Processes that judge; 0: this one."""
    timeout: float = 600.0
    """Seconds a worker has for a batch, and a server for one whole answer."""
    concurrency: int = HTTP.concurrency
    """Requests to a server at a time."""
    tries: int = HTTP.tries
    """Of a request to a server that is busy or cannot be reached."""
    answer_bytes: int | None = HTTP.answer_bytes
    """Most bytes of an answer of a server. None: enough for what is asked for."""
    key_env: str | None = ""
    """The variable with the API key; empty: no key, None: the usual one. It is not kept in the run folder."""
    engine: str = "local"
    """local, or ray: the workers are actors of a Ray cluster."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that make the same call again: `ScoreCall(**values)`."""
        return asdict(self)


@stage("loading the judge")
def open_backends(call: ScoreCall) -> list[Backend]:
    """The backends of a call: one in this process, or as many worker processes as it asks for."""
    if call.workers < 0:
        raise ConfigError("workers is out of range", seen=f"workers={call.workers}", do="give 0 or more")
    if call.workers and is_address(call.model):
        seen = f"--workers {call.workers}"
        raise ConfigError("a server is asked by this process alone", seen=seen, do="use --concurrency instead")
    if not call.workers:
        return [open_one(call)]
    settings = [WorkerSettings(environment=place, timeout=call.timeout) for place in _places(call)]
    return [WorkerBackend(call.to_dict(), one) for one in settings]


def open_one(call: ScoreCall) -> Backend:
    """The backend of a call in this process."""
    readout, limits = make_readout(call.readout), Limits(**call.limits)
    is_served = is_address(call.model)
    if call.compiled and (is_served or call.model == SCRIPTED):
        raise ConfigError("only a model is compiled", seen=f"{call.model!r} with --compile", do="leave --compile out")
    if call.model == SCRIPTED:
        return ScriptedBackend()
    if is_served:
        settings = HttpSettings(
            timeout=call.timeout, concurrency=call.concurrency, tries=call.tries, answer_bytes=call.answer_bytes
        )
        return HttpBackend(call.model, call.served, readout, settings, key=find_key(call.key_env))
    local = import_module("truebatch.scoring.backends.load")  # a server's judge need not wait for transformers
    return local.open_backend(  # type: ignore[no-any-return]
        call.model, readout, limits, dtype=call.dtype, device=call.device,
        reuse_prefix=call.reuse, reuse_images=call.reuse, compiled=call.compiled,
    )  # fmt: skip


def save_call(run: Path, call: ScoreCall) -> None:
    """Keep the call in the run folder, with whole paths: it may be made again from another folder."""
    run.mkdir(parents=True, exist_ok=True)
    model = str(Path(call.model).resolve()) if Path(call.model).is_dir() else call.model
    values = replace(call, data=str(Path(call.data).resolve()), model=model).to_dict()
    del values["key_env"]  # a folder from somebody else must not say which of the user's keys goes where
    write_json(run / CALL, values)


def load_call(run: Path) -> ScoreCall:
    """The call a run was last made with."""
    if not (run / CALL).is_file():
        raise RunError(
            f"{run} does not say how it was made",
            seen=f"no {CALL} in it",
            do="give the command of `truebatch score` again",
        )
    with corrupt_file_errors(run / CALL, do="give the command of `truebatch score` again: it writes the file anew"):
        values = read_json(run / CALL)
        return ScoreCall(**{name: value for name, value in values.items() if name != "key_env"})


def make_readout(values: Mapping[str, Any]) -> Readout:
    """A readout from plain values."""
    given = {name: value for name, value in values.items() if name != "kind"}
    kind = values.get("kind")
    if kind == "generate":
        return _make_generate(given)
    kinds: dict[Any, Any] = {"yesno": YesNo, "labels": Labels, "words": Words, "head": Head}
    if kind not in kinds:
        raise ConfigError("an unknown readout", seen=repr(kind), do=f"use one of {', '.join(kinds)}, generate")
    made: Readout = kinds[kind](**given)
    return made


def _make_generate(given: dict[str, Any]) -> Generate:
    """Texts, and how a score is read from them."""
    parse, scale = given.pop("parse", None), given.pop("scale", None)
    structured, step = given.pop("structured", ""), given.pop("step", 1.0)
    if parse is not None and parse not in PARSERS:
        raise ConfigError("an unknown parser", seen=f"--parse {parse}", do=f"use one of {', '.join(PARSERS)}")
    if parse is None and (scale or structured):
        raise ConfigError("a scale is for scores", seen=f"scale={scale!r} without a parser", do="add --parse number")
    settings = Generation(**{**given, "stop": tuple(given.get("stop", ()))})
    return Generate(settings, scale=parse_scale(scale or "") if parse else None, structured=structured or "", step=step)


def _places(call: ScoreCall) -> list[dict[str, str]]:
    """What each worker finds in its environment: on a machine with GPUs one of them, which `auto` then is."""
    found = torch.cuda.device_count()
    needs_gpu = call.device == "cuda" or (call.device == "auto" and found > 0)
    if call.model == SCRIPTED or not needs_gpu:
        return [{} for _ in range(call.workers)]
    return gpu_environments(os.environ, range(call.workers), found, asked=f"--workers {call.workers}")
