"""Real out-of-memory errors in a small training loop: the gradient of every step against the same step with room.

    python -m benchmarks oom_cuda --out oom_cuda.json
    python -m benchmarks oom_cuda --device cpu --quick     (a dry run: the system's own limit)

Needs torch and numpy. Memory is limited to less than a whole step takes, at several levels; every step begins without
a budget and must find its cut. Prints a summary and exits with 1 when a figure is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import LoadedStep, load_steps
from truebatch.errors import MemoryLimitError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.testing.failpoints import armed
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.training.memory.oom_retry import OomGuard, SampleTooLarge, most_tries
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, apply_update, step_counts, take_gradients

IGNORE = -100
FIELDS = (Field(name="input_ids"), Field(name="labels", source="input_ids", shift=1, pad=IGNORE))
TOLERANCE = 1e-5
PLACES = ("step.transfer", "step.forward", "step.backward", "step.accumulated")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class OomConfig:
    """What is run; the sizes are those of the model and its samples."""

    device: str = "cuda"
    errors: int = 50
    """Real errors that are survived at least."""
    injected: int = 1000
    """Errors raised on purpose, in twice as many steps."""
    vocab: int = 32000
    dim: int = 512
    layers: int = 4
    longest: int = 1024


class Decoder(nn.Module):
    """Right-padded causal text: a padded cell is never looked at by a token."""

    def __init__(self, vocab: int, dim: int, layers: int, heads: int = 8) -> None:
        super().__init__()
        self.tok, self.head, self.heads = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False), heads
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        x = self.tok(ids)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + mlp(x)
        return self.head(x)  # type: ignore[no-any-return]


class NextToken:
    """Cross entropy of the next token, summed."""

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        """Tokens that have a next one."""
        return {"nll": int((batch["labels"] != IGNORE).sum())}

    def sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, Tensor]:
        """All logits at once, on purpose: that is what takes memory."""
        logits = model(batch["input_ids"]).flatten(0, 1)
        return {"nll": cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")}


def make_steps(vocab: int, lengths: int, number: int, samples: int) -> list[LoadedStep]:
    """Steps of one micro-batch each, of ragged texts."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(lengths / 3), 0.7, number * samples), 4, lengths).astype(np.int64)
    texts = [{"input_ids": rng.integers(1, vocab, n)} for n in sizes]
    plan = build_plan(sizes, PlanConfig(samples_per_step=samples, seed=1))
    return list(load_steps(plan, texts, FIELDS))


def gradient(engine: StepEngine, step: LoadedStep) -> tuple[dict[str, float], Tensor]:
    """Loss and gradient of a step, on the host so that it takes no memory of the device."""
    counts = step_counts(step.batches, engine.objective, step.counts, device=engine.device)
    outcome = take_gradients(engine, step.batches, counts, epoch=0)
    parts = [p.grad.flatten().cpu() for p in engine.model.parameters() if p.grad is not None]
    engine.groups[0].optimiser.zero_grad(set_to_none=True)
    return dict(outcome.loss), torch.cat(parts).double()


def used_bytes(device: torch.device) -> int:
    """What tensors take on the device; the address space, on the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_memory(device: torch.device, num_bytes: int | None) -> None:
    """From here on the process may have this much; None: all there is."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else min(1.0, num_bytes / total), device)
    else:
        soft = resource.RLIM_INFINITY if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def room_of(engine: StepEngine, steps: list[LoadedStep]) -> tuple[list[tuple[dict[str, float], Tensor]], int]:
    """Every step with room, and the most memory one of them takes above what stays."""
    base = used_bytes(engine.device)
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
        found = [gradient(engine, step) for step in steps]
        return found, torch.cuda.max_memory_allocated(engine.device) - base
    found = [gradient(engine, step) for step in steps]
    cells = max(batch.rows().segments.num_cells for step in steps for batch in step)
    return found, 3 * 4 * cells * engine.model.head.out_features  # type: ignore[operator,return-value]


def survive(engine: StepEngine, steps: list[LoadedStep], expected: list[Any], errors: int, room: int) -> dict[str, Any]:
    """Steps under lower and lower limits, each with a guard that knows nothing, until enough errors were survived."""
    base, said = used_bytes(engine.device), []
    settled = base if engine.device.type == "cuda" else 0
    worst, tries, bound, done, unfit = 0.0, 0, 0, 0, 0
    levels = endless((0.7, 0.45, 0.3, 0.2), len(steps))
    while done < errors:
        level, at = next(levels)
        limit_memory(engine.device, base + int(level * room))
        guard = OomGuard(fields=FIELDS, say=said.append)
        guarded = StepEngine(
            model=engine.model, objective=engine.objective, groups=engine.groups, device=engine.device, guard=guard
        )
        try:
            loss, found = gradient(guarded, steps[at])
        except SampleTooLarge:
            unfit += 1
            continue
        finally:
            done += guard.recoveries
        want_loss, want = expected[at]
        worst = max(worst, float((found - want).norm() / want.norm()), abs(loss["nll"] / want_loss["nll"] - 1))
        tries, bound = max(tries, guard.recoveries + 1), max(bound, most_tries(steps[at].batches))
        if not settled and done >= errors // 5:  # on the host the first errors leave gaps, which later ones fill
            settled = used_bytes(engine.device)
    gc.collect()
    return {
        "errors": done, "worst relative difference": worst, "most tries": tries, "tries allowed": bound,
        "samples that did not fit alone": unfit, "bytes held after all": used_bytes(engine.device) - settled,
        "texts": sorted({line[line.find("(") + 1 :][:160] for line in said})[:4],
    }  # fmt: skip


def inject(device: torch.device, number: int) -> dict[str, Any]:
    """Errors in every second step of twice as many, at a place of the step and a visit of it drawn by chance."""
    model = Decoder(200, 16, 1, heads=2).to(device)
    groups = make_groups([Group(optimiser=torch.optim.AdamW(model.parameters(), 1e-3))], model)
    quiet = StepEngine(model=model, objective=NextToken(), groups=groups, device=device)
    guard = OomGuard(fields=FIELDS)
    engine = replace(quiet, guard=guard)
    steps = make_steps(200, 24, 16, 8)
    expected = [gradient(quiet, step) for step in steps]
    chance, base = np.random.default_rng(0), 0
    gc.freeze()  # what the imports left is not looked through again after every error
    strikes = set(chance.permutation(2 * number)[:number].tolist())
    worst, most, wrong = 0.0, 0, 0
    for at in range(2 * number):
        step, (_, want) = steps[at % len(steps)], expected[at % len(steps)]
        place, before = PLACES[int(chance.integers(len(PLACES)))], guard.recoveries
        with armed(f"{place}:oom:1") if at in strikes else nullcontext():
            _, found = gradient(engine, step)
        worst = max(worst, float((found - want).norm() / want.norm()))
        most = max(most, guard.recoveries - before + 1)
        wrong += (guard.recoveries - before) != (at in strikes)
        base = used_bytes(device) if at == number // 5 else base
    return {
        "steps": 2 * number, "errors": guard.recoveries, "steps with another number of errors": wrong,
        "worst relative difference": worst, "most tries": most, "tries allowed": most_tries(steps[0].batches),
        "bytes grown": used_bytes(device) - base,
    }  # fmt: skip


def inject_apart(device: str, number: int) -> dict[str, Any]:
    """In a process of its own: memory that it has freed would be room for the real errors of this one."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.scripts.oom_cuda",
        "--device",
        device,
        "--injected",
        str(number),
        "--only-injected",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def endless(levels: tuple[float, ...], steps: int) -> Iterator[tuple[float, int]]:
    """Every level with every step, again and again."""
    while True:
        for at in range(steps):
            for level in levels:
                yield level, at


def update_without_room(engine: StepEngine, step: LoadedStep) -> dict[str, Any]:
    """The first update of AdamW where its state does not fit, then the same with room: never half of one."""
    limit_memory(engine.device, None)
    counts = step_counts(step.batches, engine.objective, step.counts, device=engine.device)
    outcome = take_gradients(engine, step.batches, counts, epoch=0)
    before = torch.cat([p.detach().flatten().cpu() for p in engine.model.parameters()])
    limit_memory(engine.device, used_bytes(engine.device) + 2 * before.numel())  # half of one of the two moments
    ballast = fill_gaps(engine.device)
    said = ""
    try:
        apply_update(engine, outcome)
    except MemoryLimitError as error:
        said = error.wrong
    after = torch.cat([p.detach().flatten().cpu() for p in engine.model.parameters()])
    del ballast
    limit_memory(engine.device, None)
    if said:
        apply_update(engine, outcome)
    steps = {int(state["step"]) for state in engine.groups[0].optimiser.state.values()}
    return {"refused": said, "weights untouched": bool(torch.equal(before, after)), "updates counted": sorted(steps)}


def fill_gaps(device: torch.device) -> list[Tensor]:
    """On a GPU: tensors in all room that the allocator has between others, so that nothing more fits."""
    found: list[Tensor] = []
    if device.type != "cuda":
        return found
    for size in (64 * MIB, 8 * MIB, MIB):
        try:
            while True:
                found.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            continue
    return found


def collect_texts(device: torch.device) -> dict[str, Any]:
    """What this machine says when memory runs out, and whether it is recognised."""
    ways = {
        "more than there is": lambda: torch.empty(1 << 42, dtype=torch.uint8, device=device),
        "product": lambda: torch.ones(1 << 19, 1, device=device) @ torch.ones(1, 1 << 19, device=device),
        "host": lambda: torch.empty(1 << 46, dtype=torch.uint8),
        "numpy": lambda: np.empty(1 << 60, dtype=np.uint8),
    }
    found = {}
    for name, way in ways.items():
        try:
            way()
            found[name] = {"recognised": None, "text": "it fitted"}
        except Exception as error:
            found[name] = {"recognised": is_out_of_memory(error), "text": f"{type(error).__name__}: {error}"[:160]}
    return found


def main() -> int:
    """Run all, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--errors", type=int, default=50)
    parser.add_argument("--injected", type=int, default=1000, help="errors raised on purpose, in twice as many steps")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-injected", action="store_true", help="print what injected errors came to, as JSON")
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if given.only_injected:
        print(json.dumps(inject(device, given.injected)))
        return 0
    sizes = {"vocab": 4000, "dim": 32, "layers": 1, "longest": 64} if given.quick else {}
    config = OomConfig(device=given.device, errors=given.errors, injected=given.injected, **sizes)
    report = {**origin(config, command=command_line("benchmarks.scripts.oom_cuda")), **measure(config, device)}
    keep_result(report, given.out)
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


def measure(config: OomConfig, device: torch.device) -> dict[str, Any]:
    """Errors on purpose, real errors, what they say, and an update that does not fit; and which figures were missed."""
    model = Decoder(config.vocab, config.dim, config.layers).to(device)
    groups = make_groups([Group(optimiser=torch.optim.AdamW(model.parameters(), 1e-3))], model)
    engine = StepEngine(model=model, objective=NextToken(), groups=groups, device=device)
    steps = make_steps(config.vocab, config.longest, 4, 32)
    began = time.perf_counter()
    expected, room = room_of(engine, steps)
    report: dict[str, Any] = {"device": str(device), "room in MiB": room / MIB}
    report["injected"] = inject_apart(config.device, config.injected)
    report |= survive(engine, steps, expected, config.errors, room)
    limit_memory(device, None)
    report["texts collected"] = collect_texts(device)
    report["update"] = update_without_room(engine, steps[0])
    report["seconds"] = time.perf_counter() - began
    report["problems"] = problems(report, config.errors)
    return report


def problems(report: dict[str, Any], errors: int) -> list[str]:
    """The figures that were missed."""
    checks = {
        f"fewer than {errors} errors": report["errors"] >= errors,
        f"gradients differ by more than {TOLERANCE}": report["worst relative difference"] <= TOLERANCE,
        "more tries than allowed": report["most tries"] <= report["tries allowed"],
        "a sample that fits alone was refused": report["samples that did not fit alone"] == 0,
        "memory is held": report["bytes held after all"] <= 50 * MIB,
        "a text is not recognised": all(t["recognised"] is not False for t in report["texts collected"].values()),
        "an update that does not fit was not refused": bool(report["update"]["refused"]) or report["device"] == "cpu",
        "an update that does not fit changed weights": report["update"]["weights untouched"]
        or not report["update"]["refused"],
        "the update was not done once": report["update"]["updates counted"] == [1],
    }
    injected = report["injected"]
    checks |= {
        "an injected error was not met once": injected["steps with another number of errors"] == 0,
        f"after injected errors gradients differ by more than {TOLERANCE}": injected["worst relative difference"]
        <= TOLERANCE,
        "more tries than allowed for injected errors": injected["most tries"] <= injected["tries allowed"],
        "memory grew with injected errors": injected["bytes grown"] <= 50 * MIB,
    }
    return [name for name, is_right in checks.items() if not is_right]


if __name__ == "__main__":
    sys.exit(main())
