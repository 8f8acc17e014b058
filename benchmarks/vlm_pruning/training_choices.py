"""Ways to choose tokens in training, with a large weight of the budget, on one trained tiny backbone.

    python -m benchmarks vlm_pruning --only choices --out docs/results/vlm_pruning_choices_cpu.json

`straight_through, kept keys only` is straight-through as one writes it first: the bias of a key is 0 or minus infinity
and takes the gradient of the keep probability. A removed key has no weight and so no gradient: the task never asks for
a token back, the budget alone moves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.harness.result_file import keep_result
from benchmarks.vlm_pruning.quality import STARTER, QualityConfig, about, make_backbone
from truebatch.config.load import load_config
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch_systems.vlm_pruning.eval.evaluate import evaluate
from truebatch_systems.vlm_pruning.model.key_bias import Masking
from truebatch_systems.vlm_pruning.model.model import Choosing, PrunedVLM
from truebatch_systems.vlm_pruning.system import VLM_PRUNING, build_model, prepare_task

Say = Callable[[str], None]
KEPT_ONLY = "straight_through, kept keys only"
STRICT = (
    "method_settings.budget_of=sample", "method_settings.sparsity_loss_only_on_excess=false",
    "method_settings.sparsity_warmup_ratio=0.5", "method_settings.target_sparsity=0.72",
)  # fmt: skip
"""Every sample is held to the budget: all ways can be, and `top_k` is in any case."""
WAYS = (KEPT_ONLY, "straight_through", "soft", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoicesConfig:
    """What is compared."""

    ways: tuple[str, ...] = WAYS
    weights: tuple[float, ...] = (1000.0,)
    """Of the budget, at the end of its warm-up."""
    epochs: int = 2
    seed: int = 0
    quality: QualityConfig = field(default_factory=QualityConfig)
    """Whose backbone is pruned."""
    overrides: tuple[str, ...] = ()
    folder: Path = Path("runs/vlm_pruning_choices")


class KeptKeysOnly(PrunedVLM):
    """Masks that take the gradient of the keep probability as a bias: nothing reaches a key that is removed."""

    def _act(
        self, hidden: Tensor, masks: Masking, keep: Tensor, mask: Tensor, choosing: Choosing
    ) -> tuple[Tensor, Masking]:
        is_drawn = choosing.how == "train" and keep is not mask
        return hidden, masks.biased(mask + (keep - keep.detach()) if is_drawn else mask, None)


def run_choices(config: ChoicesConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Prune one backbone in every way with every weight; the result is written after each run."""
    began = time.monotonic()
    held = {name: value for name, value in asdict(config).items() if name != "quality"}
    result: dict[str, Any] = {"rows": [], **about(held)}
    backbone = make_backbone(config.quality, config.seed, say=say)
    for weight in config.weights:
        for way in config.ways:
            row = judge_way(config, way, weight, backbone, say=say)
            result["rows"].append(row)
            result["seconds"] = time.monotonic() - began
            keep_result(result, out)
            say(f"{way}, weight {weight:g}: {row['accuracy']:.3f} right with {row['tokens_kept']:.3f} of the tokens")
    return result


def judge_way(config: ChoicesConfig, way: str, weight: float, backbone: Path, *, say: Say) -> dict[str, Any]:
    """Accuracy and tokens kept after training in one way."""
    choice = "straight_through" if way == KEPT_ONLY else way
    given = [
        f"backbone_settings.name={backbone}", f"dataset_settings.seed={config.seed}", f"train.seed={config.seed}",
        f"method_settings.choice={choice}", *STRICT, f"method_settings.sparsity_weight_max={weight}",
        f"train.epochs={config.epochs}", *config.overrides,
    ]  # fmt: skip
    settings = load_config(settings_type(VLM_PRUNING), STARTER, overrides=given)
    made: list[PrunedVLM] = []

    def build() -> PrunedVLM:
        model = build_model(settings)
        if way == KEPT_ONLY:
            model.__class__ = KeptKeysOnly
        made.append(model)
        return model

    changed = replace(VLM_PRUNING, prepare=lambda config: replace(prepare_task(config), build_model=build))
    name = f"{way.replace(', ', '-').replace(' ', '_')}-{weight:g}"
    if train_system(changed, settings, Start(out=config.folder / name, say=say)).is_interrupted:
        raise KeyboardInterrupt  # a run that is half done has no figures
    task = prepare_task(settings)
    assert task.test is not None
    dataset = task.test()
    assert dataset is not None
    figures = evaluate(settings, made[-1].eval(), dataset, config.folder / name)
    return {
        "way": way,
        "budget_weight": weight,
        "unpruned": figures["origin"]["accuracy"],
        "accuracy": figures["hard"]["accuracy"],
        "tokens_kept": figures["hard"]["average_keep_ratio"],
        "points_lost": figures["points_lost"]["hard"],
    }
