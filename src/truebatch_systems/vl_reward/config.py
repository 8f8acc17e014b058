"""The settings of an edit-then-judge benchmark, under the names its users know. Every key is used; others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from truebatch.errors import ConfigError
from truebatch.scoring.readouts import Structured
from truebatch.scoring.readouts.scale import Kind
from truebatch_systems.vl_reward.data.dataset import Language, Wanted
from truebatch_systems.vl_reward.data.prompts import CategoryPrompt

EditorType = Literal["scripted", "folder", "diffusers"]
JudgeType = Literal["scripted", "tiny", "transformers", "http"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
ReadAs = Literal["text", "expected"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSettings:
    """Which pairs are used."""

    data_path: Path | None = None
    """The benchmark file; without one, pictures of shapes are made."""
    samples: int = 24
    """Of the made pictures."""
    categories: Sequence[str] = ()
    """Only these, in this order; their Chinese and English names mean the same. None: all."""
    difficulties: Sequence[str] = ()
    """Only these, such as easy, medium, hard. None: all."""
    tags: Sequence[str] = ()
    """Only pairs with one of these. None: all."""
    limit: int | None = None
    """Pairs of a category at most."""
    language: Language = "en"
    """Which texts of a pair are used: `edit_instruction_en` and so on, or those without `_en`."""

    def wanted(self) -> Wanted:
        """The filters."""
        return Wanted(
            categories=tuple(self.categories), difficulties=tuple(self.difficulties), tags=tuple(self.tags),
            limit=self.limit, language=self.language,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EditorParams:
    """How pictures are edited."""

    model_name: str = ""
    """diffusers: the folder of the pipeline."""
    folder: Path | None = None
    """folder: where the ready pictures are, as CATEGORY/ID.png."""
    device_ids: Sequence[int] = ()
    """One editor on each of these GPUs; none is one editor, on the first GPU or the CPU. A scripted one needs no GPU."""
    dtype: str = "bfloat16"
    """diffusers: of the weights."""
    num_inference_steps: int = 15
    """diffusers: handed to every call, as the next ones; what the pipeline does not take is refused. None: its own."""
    guidance_scale: float | None = None
    """diffusers: how strongly the instruction is followed."""
    image_guidance_scale: float | None = None
    """diffusers: how strongly the picture is kept (InstructPix2Pix)."""
    true_cfg_scale: float | None = None
    """diffusers: how strongly the instruction is followed (Qwen-Image-Edit, Flux)."""
    strength: float | None = None
    """diffusers: how much of the picture may change, above 0 to 1 (image-to-image pipelines)."""
    negative_prompt: str | None = None
    """diffusers: what is not wanted. None: a space where the pipeline's own true_cfg_scale would have no effect without."""
    arguments: dict[str, float | int | str | bool] = field(default_factory=dict)
    """diffusers: further arguments of the pipeline, such as height."""
    seed: int = 0
    """Of pairs without a seed of their own; each pair gets another one from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditorSettings:
    """What edits."""

    type: EditorType = "scripted"
    """scripted (made pictures only), folder (ready pictures), or diffusers."""
    class_path: str = "diffusers:DiffusionPipeline"
    """diffusers: the class of the pipeline, as module:Class."""
    params: EditorParams = field(default_factory=EditorParams)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeParams:
    """How edited pictures are judged."""

    model_name: str = ""
    """transformers: the folder of the judge. http: the name of the model on the server."""
    address: str = ""
    """http: the server, such as http://localhost:8000/v1."""
    key_env: str | None = None
    """http: the variable with the API key; empty sends none. None: OPENAI_API_KEY, if it is set."""
    concurrency: int = 64
    """http: requests at a time."""
    tries: int = 5
    """http: attempts for a request, where the server is busy or the connection breaks."""
    structured: Structured = ""
    """json: only answers `{"score": N}` are possible, N a whole number of the scale. http: or guided_json, guided_choice."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    device_ids: Sequence[int] = ()
    """One judge in a process of its own on each of these GPUs (on as many CPU processes with `device: cpu`)."""
    python_path: str = ""
    """The Python of another environment in which the judge runs, in a process of its own."""
    timeout: float = 600.0
    """Seconds a judge in a process of its own has for a batch; then it is replaced."""
    start_timeout: float = 1800.0
    """Seconds it has to load."""
    dtype: str = "auto"
    """auto (as saved), float32, bfloat16 or float16."""
    max_new_tokens: int = 128
    """An answer ends here at the latest."""
    readout: ReadAs = "text"
    """text: the judge writes and the score is parsed. expected: from the probabilities of all scores, nothing is written."""
    use_batch_inference: bool = True
    """False judges one by one; the scores are the same."""
    batch_size: int = 4
    """Most pairs of one forward pass."""
    cells: int | None = 32768
    """Most tokens of one forward pass, padding counted. null: as many as the GPU holds, measured before judging."""
    compare_with_original: bool = True
    """Show the source picture too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSettings:
    """What judges."""

    type: JudgeType = "scripted"
    """scripted (made pictures only), tiny (a Qwen3-VL of random weights), transformers (a folder), or http (a server)."""
    params: JudgeParams = field(default_factory=JudgeParams)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardEvaluationSettings:
    """What is made of the scores."""

    output_dir: Path = Path("runs/vl_reward")
    """The run folder: pictures, journals and reports."""
    metric: Kind = "number"
    """number: 0 to 10. yes_no: 1 or 0. pair: the smaller of two numbers."""
    max_failure_rate: float = 0.1
    """More failures than this end the command with exit code 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """All settings of a run."""

    benchmark: BenchmarkSettings = field(default_factory=BenchmarkSettings)
    diffusion_model: EditorSettings = field(default_factory=EditorSettings)
    reward_model: JudgeSettings = field(default_factory=JudgeSettings)
    prompts: dict[str, CategoryPrompt] = field(default_factory=dict)
    """By category; the made pictures bring their own."""
    evaluation: RewardEvaluationSettings = field(default_factory=RewardEvaluationSettings)

    def __post_init__(self) -> None:
        _check_numbers(self)
        editor, judge, kind = self.diffusion_model, self.reward_model, self.evaluation.metric
        if editor.type == "folder" and editor.params.folder is None:
            _refuse("diffusion_model.params.folder", None, "the folder of the ready pictures")
        if editor.type == "diffusers" and not editor.params.model_name:
            _refuse("diffusion_model.params.model_name", "", "the folder of the pipeline")
        if judge.type == "transformers" and not judge.params.model_name:
            _refuse("reward_model.params.model_name", "", "the folder of the judge")
        _check_served(judge, kind)
        if judge.params.readout == "expected" and (judge.type == "scripted" or kind == "pair"):
            _refuse("reward_model.params.readout", "expected", "text: a scripted judge and pairs of numbers need it")
        if judge.params.device_ids and judge.params.device not in ("auto", "cuda", "cpu"):
            _refuse("reward_model.params.device", judge.params.device, "auto or cpu beside device_ids")
        if self.benchmark.data_path is not None and "scripted" in (editor.type, judge.type):
            _refuse(
                "benchmark.data_path",
                str(self.benchmark.data_path),
                "no file: the scripted editor and judge know shapes only",
            )


def _check_served(judge: JudgeSettings, kind: Kind) -> None:
    """What a judge on a server needs, and what only one in this process or only one on a server takes."""
    params, default = judge.params, JudgeParams()
    if judge.type == "http":
        for name in ("address", "model_name"):
            if not getattr(params, name):
                _refuse(f"reward_model.params.{name}", "", "the address of the server and the model's name there")
        if params.readout == "expected":
            _refuse("reward_model.params.readout", "expected", "text: a server tells one token's probabilities only")
        own = ("device_ids", "python_path", "dtype", "device")
    else:
        own = ("address", "key_env", "concurrency", "tries")
    for name in own:
        if getattr(params, name) != getattr(default, name):
            _refuse(f"reward_model.params.{name}", getattr(params, name), f"nothing here: the judge is {judge.type}")
    if params.structured and (params.readout == "expected" or kind == "pair" or judge.type == "scripted"):
        _refuse(
            "reward_model.params.structured", params.structured, "nothing: only texts with one score are structured"
        )
    if params.structured not in ("", "json") and judge.type != "http":
        _refuse("reward_model.params.structured", params.structured, "json: the other ways are for servers")


def _check_numbers(config: RewardConfig) -> None:
    """Numbers and names that would otherwise be found wrong after hours of editing."""
    params, editor = config.reward_model.params, config.diffusion_model.params
    if not 0 <= config.evaluation.max_failure_rate <= 1:
        _refuse("evaluation.max_failure_rate", config.evaluation.max_failure_rate, "a share from 0 to 1")
    for name in ("batch_size", "cells", "max_new_tokens", "timeout", "start_timeout", "concurrency", "tries"):
        value = getattr(params, name)
        if value is not None and not value >= 1:
            _refuse(f"reward_model.params.{name}", getattr(params, name), "1 or more")
    if config.benchmark.samples < 1:
        _refuse("benchmark.samples", config.benchmark.samples, "1 or more")
    for place, ids in (("diffusion_model", editor.device_ids), ("reward_model", params.device_ids)):
        if len(set(ids)) < len(ids) or any(number < 0 for number in ids):
            _refuse(f"{place}.params.device_ids", list(ids), "different numbers of 0 or more")
    if editor.strength is not None and not 0 < editor.strength <= 1:
        _refuse("diffusion_model.params.strength", editor.strength, "above 0 to 1")
    if params.dtype not in DTYPES:
        _refuse("reward_model.params.dtype", params.dtype, f"one of {', '.join(DTYPES)}")
    if editor.dtype not in DTYPES[1:]:
        _refuse("diffusion_model.params.dtype", editor.dtype, f"one of {', '.join(DTYPES[1:])}")


def _refuse(name: str, value: object, rule: str) -> None:
    raise ConfigError(f"{name} does not fit", seen=f"{name}={value!r}", do=f"give {rule}")
