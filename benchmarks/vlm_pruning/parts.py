"""`python -m benchmarks vlm_pruning --only PART`: speed, or what training comes to: quality, image sizes, choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.vlm_pruning.quality import QualityConfig, run_quality
from benchmarks.vlm_pruning.run import make_config, run_pruning
from benchmarks.vlm_pruning.sizes import SizesConfig, run_sizes
from benchmarks.vlm_pruning.training_choices import ChoicesConfig, run_choices
from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest
from truebatch_systems.vlm_pruning.train.pretrain import Lessons

Say = Callable[[str], None]
PARTS = ("speed", "quality", "sizes", "choices")
_QUICK = Path("runs/vlm_pruning_choices_quick")


def run_part(part: str, asked: Mapping[str, Any], *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure one part; `asked` holds the options of the command."""
    if part not in PARTS:
        raise ConfigError(
            f"there is no such part to measure{nearest(part, list(PARTS))}", seen=f"--only {part}", do=f"{PARTS}"
        )
    if part == "speed":
        config = make_config(device=asked["device"], seconds=asked["seconds"], quick=asked["quick"])
        return run_pruning(config, out=out, say=say)
    _refuse_speed_options(part, asked)
    if part == "quality":
        return run_quality(quality_config(asked), out=out, say=say)
    seed = read_seeds(str(asked["seeds"]))[0]
    few = quality_config({**asked, "quick": True})
    if part == "sizes":
        tried = SizesConfig(
            seed=seed, sizes=("auto", 56), samples=96, epochs=1, quality=few,
            folder=Path("runs/vlm_pruning_sizes_quick"),
        )  # fmt: skip
        return run_sizes(tried if asked["quick"] else SizesConfig(seed=seed), out=out, say=say)
    quick = ChoicesConfig(seed=seed, quality=few, overrides=few.overrides, epochs=1, weights=(20.0,), folder=_QUICK)
    return run_choices(quick if asked["quick"] else ChoicesConfig(seed=seed), out=out, say=say)


def quality_config(asked: Mapping[str, Any]) -> QualityConfig:
    """The sizes of a measurement of quality; `quick` is a dry run that learns nothing."""
    seeds = read_seeds(str(asked["seeds"]))
    if not asked["quick"]:
        return QualityConfig(seeds=seeds)
    few = ("dataset_settings.train=48", "dataset_settings.validation=48", "dataset_settings.test=48", "train.epochs=1")
    return QualityConfig(
        seeds=seeds[:1],
        lessons=Lessons(epochs=1, samples=48, steps=2, attempts=1),
        overrides=few,
        folder=Path("runs/vlm_pruning_quality_quick"),
    )


def read_seeds(text: str) -> tuple[int, ...]:
    """Whole numbers with commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise ConfigError("seeds are whole numbers", seen=f"--seeds {text!r}", do="for example --seeds 0,1")
    return tuple(int(part) for part in parts)


def _refuse_speed_options(part: str, asked: Mapping[str, Any]) -> None:
    if asked["device"] != "cpu" or asked["seconds"] is not None:
        raise ConfigError(
            f"{part} trains tiny models on a CPU, to the end",
            seen=f"--device {asked['device']}, --seconds {asked['seconds']}",
            do="leave --device and --seconds out; what was trained is kept, the same command goes on",
        )
