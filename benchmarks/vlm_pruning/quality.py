"""What vlm_pruning keeps of a model that really looks: made shapes, a tiny LLaVA trained on them, then pruned.

    python -m benchmarks vlm_pruning --only quality --out docs/results/vlm_pruning_quality_cpu.json

Seed by seed: the backbone learns to answer (once; the same command finds it again), heads learn what can go (with the
settings of `truebatch init vlm_pruning`), and both are judged on the same test samples, beside ways to prune that
nothing was trained for, at equal budgets.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import truebatch_systems
from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result
from truebatch.config.load import load_config
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import MODEL, Start, settings_type, train_system
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples
from truebatch_systems.vlm_pruning.data.toy_shapes import GROUND
from truebatch_systems.vlm_pruning.eval.evaluate import LEARNED, answer_samples, budget_curve, evaluate
from truebatch_systems.vlm_pruning.eval.scorers import judge_of
from truebatch_systems.vlm_pruning.system import VLM_PRUNING
from truebatch_systems.vlm_pruning.train.pretrain import LESSONS, Lessons, pretrain_tiny

Say = Callable[[str], None]
STARTER = Path(truebatch_systems.__file__).parent / "vlm_pruning/starter/configs/vision_token_pruning.yaml.template"


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityConfig:
    """What is trained, how often, and where it is kept meanwhile."""

    seeds: tuple[int, ...] = (0, 1)
    """Of weights and of data: every seed has other pictures."""
    lessons: Lessons = LESSONS
    """Of the backbone."""
    budgets: tuple[float, ...] = (0.2, 0.25, 0.3, 0.4, 0.6, 1.0)
    overrides: tuple[str, ...] = ()
    """Further settings of the pruning run."""
    folder: Path = Path("runs/vlm_pruning_quality")
    """Runs are kept here; the same command goes on where it was stopped."""


def run_quality(config: QualityConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Train and judge seed after seed; the result is written after each."""
    began = time.monotonic()
    result: dict[str, Any] = {"summary": {}, "rows": [], "curve": [], **about(asdict(config))}
    for seed in config.seeds:
        row, curve = judge_seed(config, seed, say=say)
        result["rows"].append(row)
        result["curve"] += curve
        result["summary"] = summary(result["rows"], result["curve"])
        result["seconds"] = time.monotonic() - began
        keep_result(result, out)
        say(f"seed {seed}: {row['backbone_accuracy']:.3f} unpruned, {row['pruned_accuracy']:.3f} with "
            f"{row['tokens_kept']:.3f} of the vision tokens")  # fmt: skip
    return result


def judge_seed(config: QualityConfig, seed: int, *, say: Say) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One backbone and one pruning run: their figures, and accuracy against the budget for every way to prune."""
    folder = backbone_folder(config, seed)
    there = set(folder.glob(f"**/run/{MODEL}"))
    backbone = make_backbone(config, seed, say=say)
    pruned = open_trained(train_pruning(backbone, folder / "pruned", seed=seed, overrides=config.overrides, say=say))
    dataset: Any = pruned.task.test() if pruned.task.test else None
    figures = evaluate(pruned.config, pruned.model, dataset, folder)
    model: Any = pruned.model
    found = budget_curve(model, dataset.encoder, dataset.samples, config.budgets)
    row = {
        "seed": seed,
        "backbone_was_there": backbone in there,
        "test_samples": len(dataset),
        "backbone_accuracy": figures["origin"]["accuracy"],
        "accuracy_without_image": blind_accuracy(model, dataset),
        "pruned_accuracy": figures["hard"]["accuracy"],
        "points_lost": figures["points_lost"]["hard"],
        "tokens_kept": figures["hard"]["average_keep_ratio"],
        "pruned_interval": figures["hard"]["interval"],
    }
    curve = [
        {"seed": seed, "way": way, "tokens_kept": share, "accuracy": accuracy}
        for way, points in found.items()
        for share, accuracy in points
    ]
    return row, curve


def backbone_folder(config: QualityConfig, seed: int) -> Path:
    """Where the backbone of a seed is kept: one that had other lessons is not taken for it."""
    return config.folder / f"seed-{seed}" / f"backbone-{config.lessons.samples}x{config.lessons.epochs}"


def make_backbone(config: QualityConfig, seed: int, *, say: Say) -> Path:
    """The backbone of a seed, trained to answer if it is not there yet."""
    return pretrain_tiny(backbone_folder(config, seed), seed=seed, lessons=config.lessons, say=say)


def train_pruning(backbone: Path, out: Path, *, seed: int, overrides: Sequence[str], say: Say) -> Path:
    """A pruning run with the starter's settings on this backbone."""
    given = [f"backbone_settings.name={backbone}", f"dataset_settings.seed={seed}", f"train.seed={seed}", *overrides]
    config = load_config(settings_type(VLM_PRUNING), STARTER, overrides=given)
    if train_system(VLM_PRUNING, config, Start(out=out, target="vlm_pruning", say=say)).is_interrupted:
        raise KeyboardInterrupt  # a run that is half done has no figures
    return out


def blind_accuracy(model: Any, dataset: EncodedSamples) -> float:
    """How often the unpruned model is right when every picture is empty."""
    ground = Image.new("RGB", (56, 56), GROUND)
    blind = [{**sample, "image": ground} for sample in dataset.samples]
    judge = judge_of(blind)
    said = answer_samples(model, dataset.encoder, blind, mode="origin")
    return sum(judge(one.text, sample) for one, sample in zip(said, blind, strict=True)) / max(len(blind), 1)


def summary(rows: Sequence[Mapping[str, Any]], curve: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The worst of all seeds, against what is asked for."""
    found = {
        "least accuracy of a backbone": min(row["backbone_accuracy"] for row in rows),
        "most points lost": max(row["points_lost"] for row in rows),
        "most tokens kept": max(row["tokens_kept"] for row in rows),
    }
    ways = dict.fromkeys(one["way"] for one in curve if one["way"] != LEARNED)
    leads = {way: [_lead(row, curve, way) for row in rows] for way in ways}
    return found | {f"least points ahead of {way}": min(ones) for way, ones in leads.items()}


def _lead(row: Mapping[str, Any], curve: Sequence[Mapping[str, Any]], way: str) -> float:
    """Points the pruned model is ahead of a way that keeps at least as many tokens: the next larger budget."""
    held = [one for one in curve if (one["seed"], one["way"]) == (row["seed"], way)]
    enough = [one for one in held if one["tokens_kept"] >= row["tokens_kept"]]
    other = min(enough or held, key=lambda one: abs(one["tokens_kept"] - row["tokens_kept"]))
    return 100.0 * float(row["pruned_accuracy"] - other["accuracy"])


def about(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where and how this was measured."""
    return {
        "command": command_line("benchmarks.vlm_pruning.run"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in config.items()},
    }
