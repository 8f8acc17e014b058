"""What the benchmark of stitched models runs on: donors by their shapes, ragged samples, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.model_shapes import SHAPES, Shape, build_model
from benchmarks.training.workload import Work
from truebatch.hf.heads.heads import head_of
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Ints
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch

QWEN_1_5B = Shape(
    name="qwen2-1.5b", config="Qwen2Config",
    sizes={"num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
           "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
)  # fmt: skip
TINY_BELOW = Shape(
    name="llama-64", config="LlamaConfig",
    sizes={"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 128, "vocab_size": 97},
)  # fmt: skip
TINY_ABOVE = Shape(
    name="qwen2-96", config="Qwen2Config",
    sizes={"num_hidden_layers": 5, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3,
           "intermediate_size": 192, "vocab_size": 97},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StitchedBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    longest: int = 2048
    """The note pads every sample to this many cells."""
    median: float = 80.0
    """Of the log-normal lengths, in tokens."""
    samples: int = 8192
    budgets: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072)
    """Cells of a packed row that are tried; the fastest is the fitted budget."""
    card_gib: float = 15.0
    """The memory of the note's GPU."""
    way_seconds: float = 3.0
    seconds: float = 150.0
    """No way begins after this time; what was left out is named."""
    rounds_at_most: int = 5


TINY_SIZES: dict[str, Any] = {
    "longest": 256, "median": 18.0, "samples": 600, "budgets": (512, 2048, 8192), "way_seconds": 4.0,
}  # fmt: skip


def build_stitched(config: StitchedBenchConfig) -> Any:
    """Half of the layers below under half of the layers above, joined by a linear adapter in fp32."""
    below, above = (SHAPES["qwen2-0.5b"], QWEN_1_5B) if config.device == "cuda" else (TINY_BELOW, TINY_ABOVE)
    dtype = torch.bfloat16 if config.device == "cuda" else torch.float32
    parts = [build_model(s, longest=config.longest, device=config.device, dtype=dtype) for s in (below, above)]
    cuts = [len(part.model.layers) // 2 for part in parts]
    return stitch(parts[0], parts[1], Cut(bottom=cuts[0], top=cuts[1]), with_hashes=False).train()


def draw_lengths(config: StitchedBenchConfig, random: np.random.Generator) -> Ints:
    """Tokens of every sample, as web text has them."""
    drawn = random.lognormal(np.log(config.median), 0.9, config.samples)
    return drawn.round().clip(4, config.longest).astype(np.int64)


def make_samples(model: Any, config: StitchedBenchConfig) -> Work:
    """Random tokens of log-normal lengths, none over the longest."""
    random = np.random.default_rng(0)
    lengths = draw_lengths(config, random)
    ids = [random.integers(0, model.config.vocab_size, n) for n in lengths.tolist()]
    cells = config.budgets[0]
    return Work(head_of(model), lengths, [{"input_ids": i, "labels": i} for i in ids], cells, slots_of(cells))


def slots_of(cells: int) -> int:
    """Entries of the segment table of a packed row."""
    return max(cells // 8, 64)


def padded_shares(lengths: Ints, longest: int) -> dict[str, float]:
    """Empty cells of padded micro-batches under token budgets of one and two of the note's rows, in two sizes of step.

    A step is cut into micro-batches by length, so more samples a step and fewer cells a micro-batch leave less empty.
    """
    found = {}
    for rows in (1, 2):
        for samples in (256, 512):
            plan = build_plan(lengths, PlanConfig(cells=rows * longest, samples_per_step=samples))
            formed = [one for step in range(plan.num_steps) for rank in plan.step(step) for one in rank]
            cells = sum(one.num_rows * int(lengths[one.ids].max()) for one in formed)
            found[f"{rows * longest} cells, {samples} samples a step"] = 1 - int(lengths.sum()) / cells
    return found
