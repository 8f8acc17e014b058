"""What judges, opened from settings: in this process, or in one process a GPU that takes the next batch when it is free.

Every one answers greedily, or is read from its probabilities: a score can be had again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.hf.load import is_model_folder
from truebatch.scoring.backends.http.address import find_key
from truebatch.scoring.backends.http.client import HttpSettings
from truebatch.scoring.backends.http.openai import HttpBackend
from truebatch.scoring.backends.interface import Backend
from truebatch.scoring.backends.load import choose_device, open_backend
from truebatch.scoring.backends.subprocess import WorkerBackend, WorkerSettings
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.readouts import Generate, Labels, Readout
from truebatch.scoring.readouts.scale import Kind, Scale
from truebatch.visible_gpus import gpu_environments
from truebatch_systems.vl_reward.config import JudgeParams, JudgeSettings
from truebatch_systems.vl_reward.data.toy_pictures import ShapesJudge
from truebatch_systems.vl_reward.judge.tiny_judge import tiny_judge

MODULE = "truebatch_systems.vl_reward.judge.judge_worker"


def check_judge(judge: JudgeSettings) -> None:
    """Refuse what could not be opened later; nothing is loaded, so that it is known before anything is edited."""
    params = judge.params
    if judge.type == "http":
        open_judge(judge, "number").close()  # a rejected address or key, before anything is edited
        return
    if judge.type == "transformers" and not is_model_folder(params.model_name):
        raise ConfigError(
            "the folder of the judge holds no model",
            seen=f"reward_model.params.model_name={params.model_name!r}",
            do="name a folder with config.json and weights; a hub id is fetched with `hf download ID --local-dir FOLDER`",
        )
    if params.python_path and shutil.which(params.python_path) is None:
        raise ConfigError(
            "there is no such Python", seen=f"reward_model.params.python_path={params.python_path!r}", do="check it"
        )
    if judge.type != "scripted" and not params.device_ids:
        choose_device(params.device)
    if judge.type != "scripted" and params.device != "cpu" and params.device_ids:
        check_gpus(params.device_ids)


def check_gpus(device_ids: Any) -> None:
    """Refuse numbers of GPUs that are not there."""
    gpu_places(device_ids)


def gpu_places(device_ids: Sequence[int]) -> list[dict[str, str]]:
    """What a process of its own for each of these GPUs finds in its environment; 0 is the first that is visible here."""
    asked = f"device_ids={list(device_ids)}"
    return gpu_environments(os.environ, device_ids, torch.cuda.device_count(), asked=asked)


def open_judges(judge: JudgeSettings, metric: Kind) -> list[Backend]:
    """One judge here, or one in a process of its own for each of `device_ids`; those load when they are first asked."""
    params = judge.params
    if not params.device_ids and not params.python_path:
        return [open_judge(judge, metric)]
    call = {"type": judge.type, "params": asdict(params), "metric": metric}
    is_gpu = judge.type != "scripted" and params.device != "cpu"
    places = (gpu_places(params.device_ids) if is_gpu else [{} for _ in params.device_ids]) or [{}]
    return [WorkerBackend(call, _settings(params, place)) for place in places]


def open_judge(judge: JudgeSettings, metric: Kind) -> Backend:
    """The judge of the settings in this process, loaded."""
    if judge.type == "scripted":
        return ShapesJudge()
    params, readout, limits = judge.params, make_readout(judge.params, metric), Limits(cells=judge.params.cells)
    if judge.type == "http":
        asking = HttpSettings(
            timeout=params.timeout,
            concurrency=params.concurrency if params.use_batch_inference else 1,
            tries=params.tries,
        )
        return HttpBackend(params.address, params.model_name, readout, asking, key=find_key(params.key_env))
    if judge.type == "tiny":
        model, processor = tiny_judge()
        device = choose_device(params.device)
        return model_backend(model.to(device), processor, readout, limits, name="tiny Qwen3-VL")
    return open_backend(params.model_name, readout, limits, dtype=params.dtype, device=params.device)


def open_called(call: Mapping[str, Any]) -> Backend:
    """The judge of a call as `open_judges` sends it to a process."""
    params = {**call["params"], "device_ids": (), "python_path": ""}
    return open_judge(JudgeSettings(type=call["type"], params=JudgeParams(**params)), call["metric"])


def make_readout(params: JudgeParams, metric: Kind) -> Readout:
    """A text that is parsed, or the probabilities of all scores behind the beginning of a JSON answer."""
    if params.readout == "text":
        settings = Generation(temperature=0.0, max_new_tokens=params.max_new_tokens)
        scale = Scale(kind=metric) if params.structured else None
        return Generate(settings, scale=scale, structured=params.structured)
    if metric == "yes_no":
        return Labels({"yes": 1.0, "no": 0.0}, prefix='{"score": "')
    return Labels({str(score): float(score) for score in range(11)}, prefix='{"score":')


def _settings(params: JudgeParams, environment: Mapping[str, str]) -> WorkerSettings:
    python = str(Path(params.python_path)) if params.python_path else sys.executable
    return WorkerSettings(
        python=python, module=MODULE, environment=environment, timeout=params.timeout, start=params.start_timeout
    )
