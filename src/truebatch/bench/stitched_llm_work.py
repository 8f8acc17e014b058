"""What the benchmark of stitched models runs on: donors by their shapes, ragged samples, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truebatch.bench.training_work import Work
from truebatch.hf.heads import head_of
from truebatch.hf.shapes import SHAPES, Shape, build_model
from truebatch.planning.plan import build_plan
from truebatch.planning.settings import PlanConfig
from truebatch.systems.stitched_llm.stitching import Cut, stitch

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
    """The memory of the note's card."""
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


def make_samples(model: Any, config: StitchedBenchConfig) -> Work:
    """Random tokens of log-normal lengths, none over the longest."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(config.median), 0.9, config.samples)
    lengths = drawn.round().clip(4, config.longest).astype(np.int64)
    ids = [random.integers(0, model.config.vocab_size, n) for n in lengths.tolist()]
    cells = config.budgets[0]
    return Work(head_of(model), lengths, [{"input_ids": i, "labels": i} for i in ids], cells, slots_of(cells))


def slots_of(cells: int) -> int:
    """Entries of the segment table of a packed row."""
    return max(cells // 8, 64)


def padded_share(work: Work, config: StitchedBenchConfig) -> float:
    """Empty cells of padded micro-batches under a token budget, steps of 256 samples."""
    plan = build_plan(work.lengths, PlanConfig(cells=2 * config.longest, samples_per_step=256))
    rows = [rows for step in range(plan.num_steps) for rank in plan.step(step) for rows in rank]
    cells = sum(r.num_rows * int(work.lengths[r.ids].max()) for r in rows)
    return 1 - work.tokens / cells
