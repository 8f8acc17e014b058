"""Training a vision-language model on images of many sizes: packed, beside samples that are all alike, and beside padding.

Qwen3-VL in the shape of its 2B model (or tiny, for a CPU), random weights and pixels, tower frozen, AdamW. A token is a word or
an image feature. `packed`: our rows, as `train hf --task vlm` makes them. `uniform`: the same rows of samples that all have
the mean image and text. `padded`: transformers' own model and loss in a plain loop, samples in random order, padded to the
longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Row, option
from truebatch.batch.collate import collate
from truebatch.batch.microbatch import MicroBatch
from truebatch.hf.finetune.vision.tower import freeze_tower
from truebatch.hf.heads.heads import ModelHead, head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.image_fields import image_token_id, pixel_inputs, sample_positions
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import padded_rows
from truebatch.testing.tiny_hf.model import tiny_model

METHODS = ("packed", "uniform", "padded")
Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionOptions:
    """What is trained, on what."""

    size: str = option("2b", "Shape of the model: 2b or tiny.")
    device: str = option("cuda", "cuda (bf16) or cpu (fp32).")
    steps: int = option(4, "Timed steps of each method, after one that is not timed.")
    samples: int = option(64, "Samples of a step.")
    cells: int = option(16384, "Most cells of a packed forward pass.")
    batch: int = option(8, "Samples of a padded forward pass.")
    most_side: int = option(40, "Most image tokens along one side of an image.")
    words: int = option(150, "Mean number of words of a sample.")
    rounds: int = option(2, "Rounds, of which the best counts.")
    seed: int = option(0, "Of weights, sizes and values.")


@dataclass(frozen=True, slots=True)
class VisionCase:
    """What the methods share."""

    options: VisionOptions
    model: nn.Module
    head: ModelHead
    mixed: list[Sample]
    uniform: list[Sample]


def prepare(options: VisionOptions, case: str) -> VisionCase:
    """The model and both kinds of samples."""
    torch.manual_seed(options.seed)
    model = make_model(options)
    freeze_tower(model)
    draw = np.random.default_rng(options.seed)
    number = options.samples * (options.steps + 1)
    grids = [[tuple(draw.integers(2, options.most_side, 2)) for _ in range(draw.integers(1, 3))] for _ in range(number)]
    words = np.maximum(8, draw.lognormal(np.log(options.words) - 0.18, 0.6, number)).astype(int)
    area = np.mean([sum(h * w for h, w in one) for one in grids])
    side = max(2, round(float(area) ** 0.5))
    alike = [[(side, side)]] * number, [int(words.mean())] * number
    mixed = [make_sample(model, *one, draw) for one in zip(grids, words.tolist(), strict=True)]
    uniform = [make_sample(model, *one, draw) for one in zip(*alike, strict=True)]
    return VisionCase(options, model, head_of(model, mixed[0]), mixed, uniform)


def make_model(options: VisionOptions) -> nn.Module:
    """Random weights in the shape of Qwen3-VL 2B, or a tiny one."""
    if options.size == "tiny":
        return tiny_model("qwen3_vl", "vision_language", options.seed).to(options.device).train()
    config = transformers.Qwen3VLConfig(text_config=TEXT_2B, vision_config=VISION_2B, tie_word_embeddings=True)
    with torch.device(options.device):
        model: nn.Module = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model.train()


TEXT_2B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True
    },
}  # fmt: skip
VISION_2B = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip


def make_sample(model: nn.Module, grid: Sequence[tuple[int, int]], words: int, draw: np.random.Generator) -> Sample:
    """Images of so many tokens down and across, then words; the last half of them is learned."""
    config: Any = model.config
    image, vision = int(image_token_id(model) or 0), config.vision_config
    merge = int(vision.spatial_merge_size)
    grids = torch.tensor([[1, merge * int(h), merge * int(w)] for h, w in grid])
    width = 3 * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
    ids: list[int] = []
    for height, wide in grid:
        ids += [config.vision_start_token_id, *[image] * int(height * wide), config.vision_end_token_id]
    tokens = torch.tensor(ids + draw.integers(4, 100, words).tolist())
    labels = tokens.clone()
    labels[: len(ids) + words // 2] = -100
    pixels = torch.from_numpy(draw.standard_normal((int(grids.prod(-1).sum()), width), dtype=np.float32))
    return {
        "input_ids": tokens, "labels": labels, "pixel_values": pixels.to(torch.bfloat16), "image_grid_thw": grids,
        "mrope_positions": sample_positions(model, tokens, grids),
    }  # fmt: skip


def measure(case: VisionCase, method: str) -> Row:
    """Tokens per second, and what a step is cut into."""
    options = case.options
    samples = case.uniform if method == "uniform" else case.mixed
    trained = [p for p in case.model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.0, fused=True)  # every method starts from the same weights
    steps = [samples[at : at + options.samples] for at in range(0, len(samples), options.samples)]
    batches = [(padded_batches if method == "padded" else packed_batches)(case, step) for step in steps]
    passes = [_padded_pass(case, step) if method == "padded" else _packed_pass(case, step) for step in batches]
    first_loss = float(_step(passes[0], optimiser))
    _wait(options)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for one in passes[1:]:
        _step(one, optimiser)
    _wait(options)
    seconds = time.perf_counter() - start
    lengths = [len(sample["input_ids"]) for step in steps[1:] for sample in step]
    cells = sum(batch.segments.shape[0] * batch.segments.shape[1] for step in batches[1:] for batch in step)
    return {
        "tokens_per_second": sum(lengths) / seconds, "seconds": seconds, "fill": sum(lengths) / cells,
        "first_loss": first_loss, "longest": max(lengths), "shortest": min(lengths),
        "passes_per_step": float(np.mean([len(b) for b in batches])),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None,
    }  # fmt: skip


def packed_batches(case: VisionCase, step: Sequence[Sample]) -> list[MicroBatch]:
    """Rows end to end, as `train hf` plans them."""
    lengths = [len(sample["input_ids"]) for sample in step]
    limits = PlanConfig(layout="packed", cells=max(case.options.cells, *lengths), samples_per_step=len(step))
    plan = build_plan(np.array(lengths), limits)
    fields = case.head.fields
    (of_rank,) = plan.step(0)
    return [collate([step[i] for i in rows.ids], rows, fields) for rows in of_rank]


def padded_batches(case: VisionCase, step: Sequence[Sample]) -> list[MicroBatch]:
    """So many samples at a time, in the order in which they come."""
    found = []
    for at in range(0, len(step), case.options.batch):
        some = step[at : at + case.options.batch]
        width = max(len(sample["input_ids"]) for sample in some)
        found.append(collate(some, padded_rows(np.arange(len(some)), width), case.head.fields))
    return found


def _packed_pass(case: VisionCase, batches: Sequence[MicroBatch]) -> Callable[[], Tensor]:
    objective = HeadObjective(head=case.head)
    count = sum(objective.counts(batch)["nll"] for batch in batches)

    def run() -> Tensor:
        losses = []
        for batch in batches:
            moved = batch.to(case.options.device)
            with objective.hold(case.model, moved):
                losses.append(objective.sums(case.model, moved)["nll"] / count)
                losses[-1].backward()  # type: ignore[no-untyped-call]
        return torch.stack(losses).detach().sum()

    return run


def _padded_pass(case: VisionCase, batches: Sequence[MicroBatch]) -> Callable[[], Tensor]:
    assert case.head.images is not None
    images = case.head.images
    counts = [int((batch["labels"] != -100).sum()) for batch in batches]

    def run() -> Tensor:
        losses = []
        for batch, count in zip(batches, counts, strict=True):
            moved = batch.to(case.options.device)
            ids, dtype = moved["input_ids"], next(case.model.parameters()).dtype
            given: dict[str, Tensor] = dict(pixel_inputs(images, moved.fields))
            given["pixel_values"] = given["pixel_values"].to(dtype)
            labels = torch.cat([torch.full_like(ids[:, :1], -100), moved["labels"][:, :-1]], 1)  # the model shifts them
            types = torch.eq(ids, image_token_id(case.model) or 0).long()
            whole = {"attention_mask": moved.is_real.long(), "mm_token_type_ids": types, "labels": labels}
            loss = case.model(input_ids=ids, use_cache=False, **whole, **given).loss
            losses.append(loss * (count / sum(counts)))
            losses[-1].backward()
        return torch.stack(losses).detach().sum()

    return run


def _step(run: Callable[[], Tensor], optimiser: torch.optim.Optimizer) -> Tensor:
    loss = run()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss


def _wait(options: VisionOptions) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """How packed rows stand to samples that are all alike, and to padding."""
    speed = {row["method"]: row["tokens_per_second"] for row in rows}
    pairs = [("packed", "uniform"), ("packed", "padded")]
    return {"ratios": {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}}


BENCHMARK = Benchmark(
    name="vision_training",
    about=__doc__,
    options=VisionOptions,
    cases=lambda options: [f"qwen3-vl {options.size}, images up to {options.most_side} x {options.most_side} tokens"],
    methods=lambda options: list(METHODS),
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.rounds,
    best_of="seconds",
    summary=summarize,
    libraries=("transformers",),
)
