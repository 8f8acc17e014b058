"""The whole benchmark: read, check, edit everything, judge everything, report; killed at any moment, it resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from truebatch.config.load import dump_config
from truebatch.errors import ConfigError, DataError, RunError
from truebatch.io.atomic_files import remove_drafts, write_text
from truebatch.language.console import one_line
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.progress import OnProgress, Progress
from truebatch.scoring.readouts.scale import Scale
from truebatch.scoring.runner import RunConfig
from truebatch_systems.vl_reward.config import RewardConfig
from truebatch_systems.vl_reward.console import Say
from truebatch_systems.vl_reward.data.dataset import EditPair, Fault, image_faults, read_benchmark, require_sound
from truebatch_systems.vl_reward.data.prompts import CategoryPrompt, prompt_faults
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS, edit_picture, make_records
from truebatch_systems.vl_reward.editors import (
    DiffusersEditor,
    Editor,
    FolderEditor,
    ScriptedEditor,
    pipeline_arguments,
    pipeline_class,
)
from truebatch_systems.vl_reward.eval.report import write_reports
from truebatch_systems.vl_reward.eval.statistics import Row
from truebatch_systems.vl_reward.judge.judges import check_gpus, check_judge, open_judges
from truebatch_systems.vl_reward.stages import (
    PICTURES,
    SOURCES,
    Judging,
    edit_all,
    judge_all_edits,
    read_results,
)

BENCHMARK = "benchmark.json"
SETTINGS = "run.yaml"
"""What a run was last started with; not config.yaml, which may be the user's own file in the same folder."""
_SECONDS = 10.0
DONE, TOO_MANY_FAILED, SOME_FAILED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    summary: dict[str, Any]
    files: Sequence[Path]
    exit_code: int


def run_benchmark(config: RewardConfig, *, say: Callable[[str], None], how: RunConfig | None = None) -> Report:
    """Edit and judge all pairs that are asked for, and write the reports. The same call resumes it."""
    run, how = config.evaluation.output_dir, how or RunConfig()
    with _owning(run):
        pairs, faults = load_pairs(config)
        if faults:
            raise DataError(
                f"the benchmark has {len(faults)} fault(s)",
                seen="; ".join(map(str, faults[:5])),
                do="correct them first",
            )
        editors = make_editors(config)
        check_judge(config.reward_model)
        write_text(run / SETTINGS, dump_config(config))
        names = one_line(", ".join(dict.fromkeys(pair.category for pair in pairs)))
        say(f"{len(pairs)} pairs in {len({pair.category for pair in pairs})} categories; run: {run}")
        say(f"[stage 1/2] editing images in batches - {names}")
        watched = replace(how, on_progress=how.on_progress or _every_few_seconds(say))
        edited = edit_all(pairs, editors, run, seed=config.diffusion_model.params.seed, how=watched)
        say(f"stage 1: {edited.judged} edited now, {_counts(read_results(pairs, run), 'edit_failed')}")
        _judge(config, pairs, say, how)
        rows = read_results(pairs, run)
        summary, files = write_reports(pairs, rows, run)
    _say_means(summary, say)
    rate = summary["failure_rate"]
    code = TOO_MANY_FAILED if rate > config.evaluation.max_failure_rate else SOME_FAILED if rate > 0 else DONE
    return Report(summary, files, code)


def _judge(config: RewardConfig, pairs: Sequence[EditPair], say: Say, how: RunConfig) -> None:
    """Stage 2, with the lines of the original script for each category."""
    run, judging = config.evaluation.output_dir, judging_of(config)
    if any(row.status != "edit_failed" for row in read_results(pairs, run)):
        open_all = partial(open_judges, config.reward_model, config.evaluation.metric)
        judged = judge_all_edits(pairs, open_all, run, judging, how, say)
        say(f"stage 2: {judged.judged} judged now")


def _say_means(summary: dict[str, Any], say: Say) -> None:
    if summary["micro_mean"] is not None:
        say(f"mean score of all categories: {summary['micro_mean']:.3f}")


def _every_few_seconds(say: Say) -> OnProgress:
    """A line about the progress of editing, every few seconds."""
    last = [time.monotonic()]

    def watch(progress: Progress) -> None:
        if time.monotonic() - last[0] >= _SECONDS:
            last[0] = time.monotonic()
            say(f"  {progress.line()}")

    return watch


@contextmanager
def _owning(run: Path) -> Iterator[None]:
    """One process per run folder; drafts that a killed one left are removed."""
    run.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(run / ".run.lock").acquire(timeout=0):
            for folder in (run, *(run / PICTURES).glob("*"), run / SOURCES):
                remove_drafts(folder)
            yield
    except Timeout as error:
        raise RunError(f"another process is using {run}", seen=".run.lock is taken", do="wait for it") from error


def load_pairs(config: RewardConfig, *, with_images: bool = False) -> tuple[Sequence[EditPair], list[Fault]]:
    """The pairs that are asked for, and everything that is wrong with the file and the prompts; no model is loaded."""
    path = config.benchmark.data_path or _made(config)
    benchmark = read_benchmark(path, config.benchmark.wanted())
    faults = [*benchmark.faults, *prompt_faults(prompts_of(config), [pair.category for pair in benchmark.pairs])]
    if with_images:
        faults += image_faults(benchmark.pairs)
    if not faults:
        require_sound(benchmark)
    return benchmark.pairs, faults


def prompts_of(config: RewardConfig) -> dict[str, CategoryPrompt]:
    """The prompts of the settings, else those of the made pictures."""
    return config.prompts or (PROMPTS if config.benchmark.data_path is None else {})


def judging_of(config: RewardConfig) -> Judging:
    """How pictures are judged."""
    params = config.reward_model.params
    rows, is_served = params.batch_size if params.use_batch_inference else 1, config.reward_model.type == "http"
    return Judging(
        prompts=prompts_of(config),
        scale=Scale(kind=config.evaluation.metric),
        compare_with_original=params.compare_with_original,
        limits=Limits(level="close", rows=rows) if is_served else Limits(cells=params.cells, rows=rows, order="given"),
    )


def make_editors(config: RewardConfig) -> list[Editor]:
    """One editor for each device; not loaded yet."""
    settings, params = config.diffusion_model, config.diffusion_model.params
    if settings.type == "folder":
        assert params.folder is not None
        FolderEditor(params.folder).load()  # whether it is there at all
        return [FolderEditor(params.folder) for _ in params.device_ids or [0]]
    if settings.type == "scripted":
        return [ScriptedEditor(_edit_shape, name="shapes") for _ in params.device_ids or [0]]
    check_gpus(params.device_ids)
    if not Path(params.model_name).is_dir():
        raise ConfigError(
            "the folder of the editor is not there",
            seen=f"diffusion_model.params.model_name={params.model_name!r}",
            do="name the folder of a saved pipeline; nothing is downloaded",
        )
    devices = [f"cuda:{number}" for number in params.device_ids] or ["cuda" if torch.cuda.is_available() else "cpu"]
    names = ("guidance_scale", "image_guidance_scale", "true_cfg_scale", "strength", "negative_prompt")
    given = {name: getattr(params, name) for name in names if getattr(params, name) is not None}
    given = {"num_inference_steps": params.num_inference_steps, **given, **params.arguments}
    call = pipeline_arguments(pipeline_class(Path(params.model_name), settings.class_path), given)
    return [DiffusersEditor(params.model_name, settings.class_path, device, params.dtype, call) for device in devices]


def _edit_shape(image: Any, instruction: str, seed: int) -> Any:
    """Right three times out of four, by the seed."""
    return edit_picture(image, instruction, is_right=seed % 4 != 0)


def _made(config: RewardConfig) -> Path:
    path = config.evaluation.output_dir / BENCHMARK
    text = json.dumps(make_records(config.benchmark.samples), ensure_ascii=False)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def _counts(rows: Sequence[Row], failure: str) -> str:
    failed = sum(row.status == failure for row in rows)
    return f"{len(rows) - failed} in all, {failed} failed"
