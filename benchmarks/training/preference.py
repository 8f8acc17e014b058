"""Log-probabilities and update of GRPO and DPO: prompts shared, beside padded rows and TRL's own pass.

On one thread of a CPU seconds are CPU seconds. `--workload large --shape llama-1.1b --device cuda` is for one large GPU;
`--shrink 16` divides its tokens, to try the command elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import truebatch as tb
from benchmarks.harness.benchmark import Benchmark, Row, option
from benchmarks.model_shapes import SHAPES, Shape, build_model

OURS, PADDED, TRL = "shared prompts", "padded rows", "TRL padded"
MOST_DIFFERENCE = 1e-4
"""Between the losses of the methods in fp32, as a share of the largest where it is above 1."""


@dataclass(frozen=True, slots=True)
class Work:
    """One case: prompts, and what follows each."""

    prompt: int
    answers: int
    """Of one prompt."""
    tokens: int
    """Of an answer, or their mean."""
    groups: int
    """Prompts of one forward pass of the padded methods."""
    passes: int
    least_ratio: float
    log_normal: bool = False


WORK = {
    "small": {
        "GRPO, prompt 256, 8 answers of 64": Work(256, 8, 64, 1, 1, 2.5),
        "GRPO, prompt 1,024, 8 answers of 64": Work(1024, 8, 64, 1, 1, 4.0),
    },
    "large": {
        "GRPO, prompt 2,048, 8 answers of 256": Work(2048, 8, 256, 1, 4, 4.0),
        "DPO, prompt 512, 2 answers of 256": Work(512, 2, 256, 8, 4, 1.35),
        "DPO, prompt 512, 2 log-normal answers of mean 256": Work(512, 2, 256, 8, 4, 1.8, log_normal=True),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceOptions:
    """A model and its work."""

    workload: str = option("small", "small (for a CPU) or large (for a GPU).")
    shape: str = option("llama-small", f"llama-small, or one of {', '.join(SHAPES)}.")
    device: str = option("cpu", "cpu or cuda; cuda computes in bf16.")
    threads: int = option(1, "Of a CPU.")
    shrink: int = option(1, "Divide all tokens by this, to try a command.")
    repeats: int = option(3, "Rounds, of which the best counts.")
    seed: int = option(0, "Of weights and tokens.")


@dataclass(frozen=True, slots=True)
class Prepared:
    """One case with its model, as all methods get it."""

    options: PreferenceOptions
    work: Work
    model: Any
    optimizer: torch.optim.Optimizer
    passes: list[tuple[list[list[int]], list[list[int]]]]
    """Prompts and completions of each forward pass."""
    start: Mapping[str, Tensor]
    """Weights that every round begins with."""


def _cases(options: PreferenceOptions) -> list[str]:
    return list(WORK[options.workload])


def prepare(options: PreferenceOptions, case: str) -> Prepared:
    """The model, and random tokens."""
    work = WORK[options.workload][case]
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = _model(options)
    draw = np.random.default_rng(options.seed)
    fused = {"fused": True} if options.device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)
    words = model.config.vocab_size
    passes = [_draw(work, words, options.shrink, draw) for _ in range(work.passes)]
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return Prepared(options, work, model, optimizer, passes, start)


SMALL = Shape(
    name="llama-small", config="LlamaConfig",
    sizes={"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
           "intermediate_size": 688, "vocab_size": 2048},
)  # fmt: skip


def _model(options: PreferenceOptions) -> Any:
    shape = SHAPES.get(options.shape, SMALL)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return build_model(shape, longest=8192, device=options.device, dtype=dtype).train()


def _draw(work: Work, words: int, shrink: int, draw: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:
    prompts, completions = [], []
    for _ in range(work.groups):
        prompt = draw.integers(0, words, work.prompt // shrink).tolist()
        for _ in range(work.answers):
            mean = work.tokens // shrink
            length = max(1, round(float(draw.lognormal(np.log(mean) - 0.5, 1.0)))) if work.log_normal else mean
            prompts.append(prompt)
            completions.append(draw.integers(0, words, min(length, 6 * mean)).tolist())
    return prompts, completions


def loss_of(sums: Tensor, tokens: Tensor, work: Work) -> Tensor:
    """GRPO's policy loss with advantages of a group around 0, or DPO's against a reference of 0: sums over samples."""
    if work.answers == 2:
        pairs = sums.view(-1, 2)
        return -logsigmoid(0.1 * (pairs[:, 0] - pairs[:, 1])).sum()
    advantages = torch.linspace(-1, 1, work.answers, device=sums.device).repeat(len(sums) // work.answers)
    return -(advantages * sums / tokens).sum()


def _ours(prepared: Prepared, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    return tb.logprobs(prepared.model, prompts, completions).sums


def _rows(prepared: Prepared, prompts: list[list[int]], completions: list[list[int]]) -> tuple[Tensor, Tensor, int]:
    texts = [[*a, *b] for a, b in zip(prompts, completions, strict=True)]
    width = max(map(len, texts))
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for at, text in enumerate(texts):
        ids[at, : len(text)], mask[at, : len(text)] = torch.tensor(text), 1
    device = prepared.options.device
    return ids.to(device), mask.to(device), len(prompts[0])


def _padded(prepared: Prepared, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    """Logits of the answers' cells alone, as a careful user writes it."""
    ids, mask, prompt = _rows(prepared, prompts, completions)
    keep = ids.shape[1] - prompt
    logits = prepared.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep + 1).logits
    log_p = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0]
    return (log_p * mask[:, prompt:]).sum(1)


def _trl(prepared: Prepared, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    """The pass that TRL's trainers make, with its own head."""
    ids, mask, prompt = _rows(prepared, prompts, completions)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    found = prepared.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return found.sum(1)


PASSES: dict[str, Callable[[Prepared, list[list[int]], list[list[int]]], Tensor]] = {
    OURS: _ours,
    PADDED: _padded,
    TRL: _trl,
}


def measure(prepared: Prepared, method: str) -> Row | None:
    """Seconds of one step after another that was not counted: passes, backward, update."""
    forward = None
    if method == TRL:
        try:
            from trl.trainer.utils import add_fused_lm_head
        except ImportError:
            return None
        forward = vars(prepared.model).get("forward")
        add_fused_lm_head(prepared.model)
    try:
        _step(prepared, method)
        if prepared.options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, seconds = _step(prepared, method)
    finally:
        if method == TRL:
            vars(prepared.model).pop("forward", None)
            if forward is not None:
                prepared.model.forward = forward
    tokens = sum(len(a) + len(b) for some in prepared.passes for a, b in zip(*some, strict=True))
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if prepared.options.device == "cuda" else {}
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "loss": loss, **peak}


def _step(prepared: Prepared, method: str) -> tuple[float, float]:
    with torch.no_grad():
        for name, weight in prepared.model.named_parameters():
            weight.copy_(prepared.start[name])
    prepared.optimizer.zero_grad()
    begin, losses = _now(prepared.options), []
    for prompts, completions in _passes(prepared, method):
        sums = PASSES[method](prepared, prompts, completions)
        tokens = torch.tensor([len(one) for one in completions], device=sums.device)
        loss = loss_of(sums, tokens, prepared.work)
        loss.backward()
        losses.append(loss.detach())
    prepared.optimizer.step()
    seconds = _now(prepared.options) - begin
    return float(torch.stack(losses).sum()), seconds


def _passes(prepared: Prepared, method: str) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Rows are cut by cells in ours; padded rows are as many as fit beside each other."""
    if method != OURS:
        return prepared.passes
    prompts, completions = ([one for some in prepared.passes for one in some[at]] for at in (0, 1))
    return [(prompts, completions)]


def _now(options: PreferenceOptions) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if options.threads == 1 else time.perf_counter()


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """How many times as long each padded method takes."""
    ratios: dict[str, float] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        seconds = {row["method"]: row["seconds"] for row in rows if row["case"] == case}
        for other in (PADDED, TRL):
            if OURS in seconds and other in seconds:
                ratios[f"{case}: {other} / {OURS}"] = seconds[other] / seconds[OURS]
    return {"ratios": ratios}


def find_problems(result: Mapping[str, Any]) -> list[str]:
    """A gain too small, or losses that do not agree."""
    limits = {case: work for some in WORK.values() for case, work in some.items()}
    found = []
    for name, ratio in result.get("ratios", {}).items():
        case, _, pair = name.rpartition(": ")
        wanted = TRL if case in WORK["large"] else PADDED
        if pair.startswith(wanted) and ratio < limits[case].least_ratio:
            found.append(f"{name} is {ratio:.2f}, not {limits[case].least_ratio}")
    return found + _disagreements(result)


def _disagreements(result: Mapping[str, Any]) -> list[str]:
    if any("peak_gib" in row for row in result["rows"]):
        return []  # bf16 on a GPU rounds more than the methods differ
    found = []
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        losses = [row["loss"] for row in result["rows"] if row["case"] == case]
        if max(losses) - min(losses) > MOST_DIFFERENCE * max(1.0, *map(abs, losses)):
            found.append(f"{case}: losses from {min(losses):.6g} to {max(losses):.6g}")
    return found


BENCHMARK = Benchmark(
    name="preference",
    about=__doc__,
    options=PreferenceOptions,
    cases=_cases,
    methods=lambda options: list(PASSES),
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.repeats,
    best_of="seconds",
    summary=summarize,
    problems=find_problems,
    libraries=("torch", "transformers", "trl"),
)
