"""The whole benchmark: read, check, edit everything, judge everything, report; killed at any moment, it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from truebatch.errors import ConfigError, DataError
from truebatch.generation.settings import Generation
from truebatch.scoring.backend import Backend
from truebatch.scoring.batching import Limits
from truebatch.scoring.opening import open_backend
from truebatch.scoring.readouts import Generate
from truebatch.scoring.running import Running
from truebatch.systems.vl_reward.benchmark import Fault, Pair, image_faults, read_benchmark, require_sound
from truebatch.systems.vl_reward.editors import DiffusersEditor, Editor, FolderEditor, ScriptedEditor
from truebatch.systems.vl_reward.parsing import Scale
from truebatch.systems.vl_reward.prompts import Prompt, prompt_faults
from truebatch.systems.vl_reward.reporting import write_reports
from truebatch.systems.vl_reward.settings import RewardConfig
from truebatch.systems.vl_reward.shapes import PROMPTS, ShapesJudge, edit_picture, make_records
from truebatch.systems.vl_reward.stages import Judging, edit_all, judge_all_edits, read_results
from truebatch.training.durable import write_text

BENCHMARK = "benchmark.json"
DONE, TOO_MANY_FAILED, SOME_FAILED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Report:
    """How a run came out."""

    summary: dict[str, Any]
    files: Sequence[Path]
    exit_code: int


def run_benchmark(config: RewardConfig, *, say: Callable[[str], None], how: Running | None = None) -> Report:
    """Edit and judge all pairs that are asked for, and write the reports. The same call goes on after any end."""
    run, how = config.evaluation.output_dir, how or Running()
    pairs, faults = load_pairs(config)
    if faults:
        raise DataError(
            f"the benchmark has {len(faults)} fault(s)", seen="; ".join(map(str, faults[:5])), do="mend them first"
        )
    say(f"{len(pairs)} pairs in {len({pair.category for pair in pairs})} categories; run: {run}")
    edited = edit_all(pairs, make_editors(config), run, seed=config.diffusion_model.params.seed, how=how)
    say(f"stage 1: {edited.judged} edited now, {_counts(edited.told.results)}")
    judged = judge_all_edits(pairs, partial(open_judge, config), run, judging_of(config), how)
    say(f"stage 2: {judged.judged} judged now, {_counts(judged.told.results)}")
    rows = read_results(pairs, run)
    summary, files = write_reports(pairs, rows, run)
    rate = summary["failure_rate"]
    code = TOO_MANY_FAILED if rate > config.evaluation.max_failure_rate else SOME_FAILED if rate > 0 else DONE
    return Report(summary, files, code)


def load_pairs(config: RewardConfig, *, with_images: bool = False) -> tuple[Sequence[Pair], list[Fault]]:
    """The pairs that are asked for, and everything that is wrong with the file and the prompts; no model is loaded."""
    path = config.benchmark.data_path or _made(config)
    benchmark = read_benchmark(path, config.benchmark.wanted())
    faults = [*benchmark.faults, *prompt_faults(prompts_of(config), [pair.category for pair in benchmark.pairs])]
    if with_images:
        faults += image_faults(benchmark.pairs)
    if not faults:
        require_sound(benchmark)
    return benchmark.pairs, faults


def prompts_of(config: RewardConfig) -> dict[str, Prompt]:
    """The prompts of the settings, else those of the made pictures."""
    return config.prompts or (PROMPTS if config.benchmark.data_path is None else {})


def judging_of(config: RewardConfig) -> Judging:
    """How pictures are judged."""
    params = config.reward_model.params
    rows = params.batch_size if params.use_batch_inference else 1
    return Judging(
        prompts=prompts_of(config),
        scale=Scale(kind=config.evaluation.metric),
        compare_with_original=params.compare_with_original,
        limits=Limits(level="plan", cells=params.cells, rows=rows),
    )


def make_editors(config: RewardConfig) -> list[Editor]:
    """One editor for each device; not loaded yet."""
    settings, params = config.diffusion_model, config.diffusion_model.params
    if settings.type == "folder":
        assert params.folder is not None
        return [FolderEditor(params.folder)]
    if settings.type == "scripted":
        return [ScriptedEditor(_edit_shape, name="shapes")]
    devices = [f"cuda:{number}" for number in params.device_ids] or ["cuda" if torch.cuda.is_available() else "cpu"]
    if params.device_ids and torch.cuda.device_count() <= max(params.device_ids):
        raise ConfigError(
            "a GPU of device_ids is not there",
            seen=f"device_ids={list(params.device_ids)}, {torch.cuda.device_count()} GPU(s)",
            do="name those that `nvidia-smi` shows",
        )
    call = {
        "num_inference_steps": params.num_inference_steps, "true_cfg_scale": params.true_cfg_scale,
        "negative_prompt": params.negative_prompt,
    }  # fmt: skip
    return [DiffusersEditor(params.model_name, settings.class_path, device, params.dtype, call) for device in devices]


def open_judge(config: RewardConfig) -> Backend:
    """The judge, loaded. It answers greedily: a score can be had again."""
    if config.reward_model.type == "scripted":
        return ShapesJudge()
    params = config.reward_model.params
    readout = Generate(Generation(temperature=0.0, max_new_tokens=params.max_new_tokens))
    return open_backend(
        params.model_name, readout, judging_of(config).limits, dtype=params.dtype, device=params.device
    )  # fmt: skip


def _edit_shape(image: Any, instruction: str, seed: int) -> Any:
    """Right three times of four, by the seed."""
    return edit_picture(image, instruction, is_right=seed % 4 != 0)


def _made(config: RewardConfig) -> Path:
    path = config.evaluation.output_dir / BENCHMARK
    text = json.dumps(make_records(config.benchmark.samples), ensure_ascii=False)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def _counts(results: Any) -> str:
    failed = sum(outcome.status == "failed" for outcome in results.values())
    return f"{len(results) - failed} in all, {failed} failed"
