"""Attention on a GPU: every kernel against one sample alone, independence of neighbours, tiny models, timings.

    python -m benchmarks attention_cuda --out attention_cuda.json
    python -m benchmarks attention_cuda --device cpu --quick     (a dry run without a GPU)

Needs torch, transformers and numpy. Prints one line a check, at once, and exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from benchmarks.harness.result_file import today
from truebatch.attention.api import attend, gather_facts
from truebatch.attention.dispatch import choose_kernel
from truebatch.attention.score_rule import Rule
from truebatch.batch.segments import Segments, packed_segments, padded_segments
from truebatch.hf.attention.packed import packed_inputs, use_packed_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTHS = [33, 128, 1, 200, 7, 64, 128]
HALF = (torch.bfloat16, torch.float16)
HEADS = {"equal": (4, 4), "grouped": (8, 2)}
HEAD_SIZES = (16, 20, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288)
Row = dict[str, Any]


def make(segments: Segments, *, heads: tuple[int, int], width: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Query, key and value in the layout that projections give: [B, T, H, D] seen as [B, H, T, D]."""
    chance = torch.Generator().manual_seed(seed)
    rows, cells = segments.shape
    parts = [torch.randn(rows, cells, h, width, generator=chance) for h in (heads[0], heads[1], heads[1])]
    device = segments.starts.device
    return [part.to(device, dtype).transpose(1, 2).detach().requires_grad_() for part in parts]


def run_kernel(parts: list[Tensor], segments: Segments, kernel: str | None, **rule: Any) -> list[Tensor]:
    """Output and the three gradients, zero outside real cells."""
    real = segments.is_real[:, None, :, None]
    out = attend(*parts, segments, kernel=kernel, **rule)
    chance = torch.Generator().manual_seed(9)
    weight = torch.randn(out.shape, generator=chance).to(out.device, out.dtype).masked_fill(~real, 0)
    grads = torch.autograd.grad(out, parts, weight)
    return [out.detach().masked_fill(~real, 0), *grads]


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest ||a-b|| / ||b|| over output and gradients."""
    pairs = zip(got, want, strict=True)
    return max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)


def layouts(device: str) -> dict[str, Segments]:
    total = sum(LENGTHS)
    found = {
        "packed": packed_segments(LENGTHS),
        "packed, empty slots, tail": packed_segments(LENGTHS, cells=total + 79, slots=24, max_length=256),
        "padded right": padded_segments(LENGTHS, 208),
        "padded left": padded_segments(LENGTHS, 208, "left"),
    }
    return {name: segments.to(device) for name, segments in found.items()}


Case = tuple[str, str, torch.dtype, int, bool, int | None]


def equality_cases(quick: bool) -> list[Case]:
    """Every head size once in each precision; every layout, grouping, direction and window at two head sizes."""
    dtypes = (torch.float32, *HALF)
    sizes = (20, 64) if quick else HEAD_SIZES
    cases: list[Case] = [("packed", "grouped", dtype, width, True, None) for width, dtype in product(sizes, dtypes)]
    windows = ((True, None), (False, None), (True, 1), (True, 50), (False, 50))
    names = ("packed", "packed, empty slots, tail", "padded right", "padded left")
    around = product(names, HEADS, dtypes, (64,) if quick else (64, 20), windows)
    cases += [(name, heads, dtype, width, causal, window) for name, heads, dtype, width, (causal, window) in around]
    return list(dict.fromkeys(cases))


def check_equality(device: str, quick: bool) -> Iterator[Row]:
    """Every kernel as near to the exact result as one sample at a time in the same precision."""
    found = layouts(device)
    for layout, grouping, dtype, width, causal, window in equality_cases(quick):
        segments = found[layout]
        rule = {"causal": causal, "window": window}
        parts = make(segments, heads=HEADS[grouping], width=width, dtype=dtype)
        exact = [part.detach().double().requires_grad_() for part in parts]
        want = run_kernel(
            exact, segments, "block", **rule
        )  # in fp64 any kernel is exact, and this one has few launches
        alone = distance(run_kernel(parts, segments, "per_segment", **rule), want)
        kernels = ["block", None] + (["varlen"] if device == "cuda" and dtype in HALF else [])
        for kernel in kernels:
            case = f"{layout} | {grouping} | {dtype} | D={width} | causal={causal} | window={window} | {kernel}"
            facts = gather_facts(parts[0], parts[2], segments, Rule(causal=causal, window=window))
            chosen = choose_kernel(facts)
            yield judge(
                "equality",
                case,
                lambda k=kernel, p=parts, s=segments, r=rule, w=want: distance(run_kernel(p, s, k, **r), w),
                limit=max(2 * alone, 2e-6),
                expected_to_fail=kernel == "varlen" and chosen != "varlen",
            )


def judge(check: str, case: str, measure: Callable[[], float], *, limit: float, expected_to_fail: bool = False) -> Row:
    """One line of the report; a refusal of a kernel that the table never chooses is no failure."""
    row: Row = {"check": check, "case": case, "limit": limit}
    try:
        row["value"] = measure()
        row["ok"] = bool(row["value"] <= limit)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        row |= {"ok": expected_to_fail, "error": f"{type(error).__name__}: {error}"[:300]}
    row["unchosen"] = expected_to_fail
    return row


def check_independence(device: str) -> Iterator[Row]:
    """A sample's output and gradients do not change by a bit with what else is packed."""
    kernels = ["varlen", "per_segment"] if device == "cuda" else ["per_segment"]
    alone = packed_segments([200]).to(device)
    crowds = {"short neighbours": [5, 200, 9, 30], "a long neighbour": [200, 3000], "many": [200, *[17] * 60]}
    for kernel, width, causal, (name, lengths) in product(kernels, (64, 128), (True, False), crowds.items()):
        dtype = torch.bfloat16
        crowd = packed_segments(lengths).to(device)
        first = crowd.sample_starts[lengths.index(200)]
        parts = make(crowd, heads=(8, 2), width=width, dtype=dtype)
        own = [part.detach()[:, :, first : first + 200].clone().requires_grad_() for part in parts]
        got, want = (attend(*p, s, causal=causal, kernel=kernel) for p, s in ((parts, crowd), (own, alone)))
        weight = torch.ones_like(want)
        spread = torch.zeros_like(got)
        spread[:, :, first : first + 200] = weight
        grads = torch.autograd.grad(got, parts, spread)
        own_grads = torch.autograd.grad(want, own, weight)
        span = slice(first, first + 200)
        pairs = zip([got.detach(), *grads], [want.detach(), *own_grads], strict=True)
        moved = [float((one[:, :, span].float() - other.float()).abs().max()) for one, other in pairs]
        for grad in grads:
            grad[:, :, span] = 0
        leaked = max(float(grad.abs().max()) for grad in grads)
        case = f"{kernel} | D={width} | causal={causal} | {name}"
        yield {"check": "bitwise forward", "case": case, "value": moved[0], "limit": 0.0, "ok": moved[0] == 0}
        yield {"check": "bitwise backward (reported)", "case": case, "value": max(moved[1:]), "limit": None, "ok": True}
        yield {"check": "no gradient to neighbours", "case": case, "value": leaked, "limit": 0.0, "ok": leaked == 0}


def tiny_models() -> dict[str, Callable[[], PreTrainedModel]]:
    none = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    common = {**sizes, **none, "num_attention_heads": 4, "max_position_embeddings": 512}
    grouped = {**common, "num_key_value_heads": 2}
    mixed = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    configs = {
        "llama": transformers.LlamaConfig(**grouped),
        "mistral": transformers.MistralConfig(**grouped, sliding_window=16),
        "qwen3": transformers.Qwen3Config(**grouped, head_dim=32),
        "gemma2": transformers.Gemma2Config(**grouped, head_dim=32, attn_logit_softcapping=0.5, **mixed),
        "gemma3_text": transformers.Gemma3TextConfig(**grouped, head_dim=32, **mixed),
        "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=128, n_layer=2, n_head=4, n_positions=512, **none),
        "gpt_oss": transformers.GptOssConfig(**grouped, head_dim=32, **experts, **mixed, **rope),
        "bert": transformers.BertConfig(**common),
    }
    return {name: (lambda config=config: build(config)) for name, config in configs.items()}


def build(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    masked = isinstance(config, transformers.BertConfig)
    family = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model: PreTrainedModel = family.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def model_result(model: PreTrainedModel, samples: list[Tensor], packed: bool) -> tuple[Tensor, Tensor]:
    """Logits of all cells and all gradients as one vector, packed or one sample a call."""
    model.zero_grad()
    if packed:
        lengths = [len(sample) for sample in samples]
        segments = packed_segments(lengths, cells=sum(lengths) + 30, slots=16).to(model.device)
        row = torch.zeros(1, sum(lengths) + 30, dtype=torch.long, device=model.device)
        row[0, : sum(lengths)] = torch.cat(samples)
        with use_packed_attention(model):
            logits = model(input_ids=row, **packed_inputs(segments)).logits[0, : sum(lengths)]
    else:
        logits = torch.cat([model(input_ids=sample[None]).logits[0] for sample in samples])
    (logits.float() * torch.linspace(-1, 1, 97, device=logits.device).sin()).tanh().sum().backward()
    grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach().float(), torch.cat(grads)


def check_models(device: str) -> Iterator[Row]:
    """Packed models at most twice as far from fp32 one by one as the same precision one by one is."""
    samples = [torch.randint(1, 97, (n,)).to(device) for n in (40, 7, 100, 40, 1)]
    for (name, make_model), dtype in product(tiny_models().items(), (torch.float32, torch.bfloat16)):
        want = model_result(make_model().to(device), samples, packed=False)
        model = make_model().to(device, dtype)
        alone = distance(list(model_result(model, samples, packed=False)), list(want))
        limit = max(2 * alone, 1e-5)
        yield judge(
            "model",
            f"{name} | {dtype} | packed",
            lambda m=model, w=want: distance(list(model_result(m, samples, packed=True)), list(w)),
            limit=limit,
        )


def check_compiled(device: str) -> Iterator[Row]:
    """A compiled model with static shapes compiles once and gives what the eager one gives."""
    model = tiny_models()["llama"]().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    graphs: list[int] = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs.append(1)
        return compile_fx(graph, example_inputs) if device == "cuda" else graph.forward

    compiled = torch.compile(model, backend=count, dynamic=False, fullgraph=True)

    def measure() -> float:
        worst = 0.0
        with use_packed_attention(model), torch.no_grad():
            for lengths in ([100, 20, 80], [50] * 4, [200]):
                segments = packed_segments(lengths, cells=256, slots=16, max_length=256).to(device)
                row = torch.randint(1, 97, (1, 256), device=device)
                inputs = {"input_ids": row, "use_cache": False, **packed_inputs(segments)}
                want, got = model(**inputs).logits[:, :200], compiled(**inputs).logits[:, :200]
                worst = max(worst, distance([got], [want]))
        return worst

    yield judge("compiled", "llama, static shapes, three packings", measure, limit=2e-2)
    yield {"check": "compiled once", "case": "llama", "value": len(graphs), "limit": 1, "ok": len(graphs) == 1}


def check_padding_content(device: str) -> Iterator[Row]:
    """Garbage and NaN in padding change no bit of a sample."""
    for (layout, segments), fill, dtype in product(
        layouts(device).items(), (1e4, float("nan")), (torch.float32, *HALF)
    ):
        parts = make(segments, heads=(4, 2), width=64, dtype=dtype)
        real = segments.is_real[:, None, :, None]
        dirty = [torch.where(real, part.detach(), fill).requires_grad_() for part in parts]
        clean, other = (run_kernel(p, segments, None, causal=True)[0] for p in (parts, dirty))
        moved = float((clean.float() - other.float()).abs().max())
        case = f"{layout} | {dtype} | {fill}"
        yield {"check": "padding content", "case": case, "value": moved, "limit": 0.0, "ok": moved == 0}


def time_one(work: Callable[[], object], device: str) -> float:
    """Median milliseconds."""
    times = []
    for i in range(6):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            stop.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(stop)
        else:
            before = time.perf_counter()
            work()
            elapsed = (time.perf_counter() - before) * 1e3
        if i >= 2:
            times.append(elapsed)
    return statistics.median(times)


def timings(device: str, quick: bool) -> Iterator[Row]:
    """Forward and backward of every kernel at a few shapes; the table's choice should be the fastest or near it."""
    chance = np.random.default_rng(0)
    shapes = {
        "chat 16k": np.clip(chance.lognormal(5.2, 0.9, 60), 8, 2000).astype(int).tolist(),
        "8 long of 2048": [2048] * 8,
        "400 short": chance.integers(10, 60, 400).tolist(),
        "64 short": chance.integers(10, 60, 64).tolist(),
        "16 of 100..300": chance.integers(100, 300, 16).tolist(),
    }
    if quick:
        shapes = {"64 short": shapes["64 short"]}
    for (name, lengths), dtype in product(shapes.items(), (torch.bfloat16, torch.float32)):
        segments = packed_segments(lengths).to(device)
        parts = make(segments, heads=(16, 4), width=64, dtype=dtype)
        kernels = ["per_segment", "block"] + (["varlen"] if device == "cuda" and dtype in HALF else [])
        weight = torch.ones_like(parts[0])
        row: Row = {"check": "timing", "case": f"{name} | {dtype}", "ok": True, "milliseconds": {}}
        row["chosen"] = choose_kernel(gather_facts(parts[0], parts[2], segments, Rule(causal=True)))
        row["distinct_lengths"], row["cells"] = len(set(lengths)), sum(lengths)
        for kernel in kernels:
            try:
                row["milliseconds"][kernel] = time_one(
                    lambda p=parts, s=segments, k=kernel, w=weight: torch.autograd.grad(
                        attend(*p, s, causal=True, kernel=k), p, w
                    ),
                    device,
                )
            except torch.OutOfMemoryError as error:
                row["milliseconds"][kernel] = str(error)[:80]
        yield row


def time_prebuilt(device: str) -> Iterator[Row]:
    """What the varlen path costs above the bare kernel: padding a head, reshaping, choosing."""
    if device != "cuda":
        return
    segments = packed_segments([290] * 56).to(device)
    parts = make(segments, heads=(32, 4), width=64, dtype=torch.bfloat16)
    flat = [part.detach().transpose(1, 2)[0].requires_grad_() for part in parts]
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    options |= {"enable_gqa": True} if "enable_gqa" in names else {}
    starts, longest = segments.starts, segments.max_length
    bare = time_one(lambda: varlen_attn(*flat, starts, starts, longest, longest, **options).sum().backward(), device)
    ours = time_one(lambda: attend(*parts, segments, causal=True).sum().backward(), device)
    yield {
        "check": "timing",
        "case": "56 x 290, bare kernel and attend",
        "ok": True,
        "milliseconds": {"bare": bare, "attend": ours},
    }


def guarded(rows: Iterator[Row], name: str) -> Iterator[Row]:
    """A part that crashes is one failed line, and the other parts still run."""
    try:
        yield from rows
    except Exception:  # the report is the place for it: it is printed, written and makes the exit code 1
        yield {"check": name, "case": "crashed", "ok": False, "error": traceback.format_exc()[-1500:]}


def show(row: Row) -> Row:
    """Print one line a check at once: a slow or hanging one is then seen."""
    mark = "ok " if row["ok"] else "BAD"
    rest = {key: value for key, value in row.items() if key not in ("check", "case", "ok")}
    print(f"{mark} {row['check']} | {row['case']} {json.dumps(rest)}", flush=True)
    return row


def environment(device: str) -> Row:
    hardware = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    capability = list(torch.cuda.get_device_capability()) if device == "cuda" else None
    return {
        "card": hardware,
        "capability": capability,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "varlen_attn": str(inspect.signature(varlen_attn)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="two head sizes and one timing")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = {
        "equality": check_equality(args.device, args.quick),
        "independence": check_independence(args.device),
        "padding": check_padding_content(args.device),
        "models": check_models(args.device),
        "compiled": check_compiled(args.device),
        "timings": timings(args.device, args.quick),
        "bare": time_prebuilt(args.device),
    }
    report: Row = {"environment": environment(args.device), "rows": []}
    report["command"] = " ".join(["python", "-m", "benchmarks", "attention_cuda", *sys.argv[1:]])
    report["date"] = today()
    print(json.dumps(report["environment"], indent=2), flush=True)
    for name, rows in parts.items():
        began = time.perf_counter()
        found = [show(row) for row in guarded(rows, name)]
        report["rows"] += found
        good = sum(row["ok"] for row in found)
        print(f"{name}: {good} of {len(found)} ok in {time.perf_counter() - began:.1f} s", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if all(row["ok"] for row in report["rows"]) else 1)


if __name__ == "__main__":
    main()
