"""The settings of an edit-then-judge benchmark, under the names its users know. Every key is used; others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from truebatch.errors import ConfigError
from truebatch.systems.vl_reward.benchmark import Language, Wanted
from truebatch.systems.vl_reward.parsing import Kind
from truebatch.systems.vl_reward.prompts import Prompt

EditorType = Literal["scripted", "folder", "diffusers"]
JudgeType = Literal["scripted", "transformers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSettings:
    """Which pairs are used."""

    data_path: Path | None = None
    """The benchmark file; without one, pictures of shapes are made."""
    samples: int = 24
    """Of the made pictures."""
    categories: Sequence[str] = ()
    difficulties: Sequence[str] = ()
    tags: Sequence[str] = ()
    limit: int | None = None
    """Pairs of a category at most."""
    language: Language = "en"

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
    """diffusers: one editor on each of these GPUs; none is the first GPU, or the CPU without one."""
    dtype: str = "bfloat16"
    num_inference_steps: int = 15
    true_cfg_scale: float = 4.0
    negative_prompt: str = " "
    seed: int = 0
    """Of pairs without a seed of their own; each pair gets another one from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditorSettings:
    """What edits."""

    type: EditorType = "scripted"
    class_path: str = "diffusers:DiffusionPipeline"
    params: EditorParams = field(default_factory=EditorParams)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeParams:
    """How edited pictures are judged."""

    model_name: str = ""
    """transformers: the folder of the judge."""
    device: str = "auto"
    dtype: str = "auto"
    max_new_tokens: int = 128
    use_batch_inference: bool = True
    """False judges one by one; the scores are the same."""
    batch_size: int = 4
    """Most pairs of one forward pass."""
    cells: int = 32768
    """Most tokens of one forward pass, padding counted."""
    compare_with_original: bool = True
    """Show the source picture too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSettings:
    """What judges."""

    type: JudgeType = "scripted"
    params: JudgeParams = field(default_factory=JudgeParams)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What is made of the scores."""

    output_dir: Path = Path("runs/vl_reward")
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
    prompts: dict[str, Prompt] = field(default_factory=dict)
    """By category; the made pictures bring their own."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.evaluation.max_failure_rate <= 1:
            _refuse("evaluation.max_failure_rate", self.evaluation.max_failure_rate, "a share from 0 to 1")
        if self.reward_model.params.batch_size < 1:
            _refuse("reward_model.params.batch_size", self.reward_model.params.batch_size, "1 or more")
        if self.diffusion_model.type == "folder" and self.diffusion_model.params.folder is None:
            _refuse("diffusion_model.params.folder", None, "the folder of the ready pictures")
        if self.diffusion_model.type == "diffusers" and not self.diffusion_model.params.model_name:
            _refuse("diffusion_model.params.model_name", "", "the folder of the pipeline")
        if self.reward_model.type == "transformers" and not self.reward_model.params.model_name:
            _refuse("reward_model.params.model_name", "", "the folder of the judge")
        if self.benchmark.data_path is not None and "scripted" in (self.diffusion_model.type, self.reward_model.type):
            _refuse(
                "benchmark.data_path",
                str(self.benchmark.data_path),
                "no file: the scripted editor and judge know shapes only",
            )


def _refuse(name: str, value: object, rule: str) -> None:
    raise ConfigError(f"{name} does not fit", seen=f"{name}={value!r}", do=f"give {rule}")
