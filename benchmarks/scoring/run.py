"""Scoring and batched generation measured: our way beside transformers' own, and what planning and the journal cost.

    python -m benchmarks scoring --device cpu --out docs/results/scoring_cpu.json
    PYTHONPATH=src python3 -m benchmarks.scoring.run --device cuda --seconds 480 --out scoring_cuda.json

Equal answers are counted against one by one with transformers' own `generate` (texts) or ours (labels, images). On a
CPU a tiny model in fp32 runs on one thread and CPU seconds count; on a GPU a Llama of 1.1B and a Qwen3-VL of 8B
parameters in bf16. Weights are random, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from benchmarks.scoring.workload import Ours, Way, make_llama, make_qwen, picture_prompts, text_prompts, theirs
from benchmarks.training.timing import time_once
from truebatch.errors import ConfigError
from truebatch.hf.generate.image_cache import ImagePrompt
from truebatch.scoring.backends.interface import Cost
from truebatch.scoring.batch_plan import Limits, plan_batches
from truebatch.scoring.inputs.images import image_sizes
from truebatch.scoring.memory_budget import fit_prepared, grown
from truebatch.scoring.store.input_index import list_samples
from truebatch.scoring.store.journal import open_journal
from truebatch.scoring.store.outcome import Outcome

Say = Callable[[str], None]
PARTS = ("texts", "pictures, labels", "pictures, texts")
SHAPE, TURNED, ALONE = "level shape", "level shape, turned around", "level shape, one at a time"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringBench:
    """What is measured."""

    device: str = "cpu"
    is_tiny: bool = True
    texts: int = 48
    pictures: int = 24
    picture_tokens: int = 80
    side: int = 8
    """Patches of an image in each direction."""
    new_tokens: int = 16
    cells: int = 4096
    planned: int = 10_000
    rounds: int = 2
    only: tuple[str, ...] = ()
    """Parts that are measured, of `PARTS`; none named: all."""
    ways: tuple[str, ...] = ()
    """How the names of ways begin that are measured; none named: all."""
    seconds: float = 600.0
    """Nothing begins after this time; what was left out is named."""


def make_config(*, device: str = "cpu", seconds: float | None = None, quick: bool = False) -> ScoringBench:
    """Sizes for a CPU or a GPU; quick: a dry run with tiny models anywhere."""
    if quick:
        return ScoringBench(
            device=device, texts=8, pictures=4, new_tokens=4, planned=500, rounds=1, seconds=seconds or 60
        )
    if device == "cpu":
        return ScoringBench(seconds=seconds or 600)
    return ScoringBench(
        device=device, is_tiny=False, texts=128, pictures=256, picture_tokens=500, side=28, new_tokens=64,
        cells=65_536, rounds=1, seconds=seconds or 480,
    )  # fmt: skip


def run_bench(config: ScoringBench, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure everything; the result is written after every row."""
    if config.device == "cpu":
        torch.set_num_threads(1)
    result: dict[str, Any] = {
        "ratios": {},
        "overheads": {},
        "rows": [],
        "left_out": [],
        **origin(config, "transformers", command=command_line("benchmarks.scoring.run")),
    }
    began = time.monotonic()
    result["overheads"] = _overheads(config)
    for name, value in result["overheads"].items():
        say(f"{name}: {value:.4g}")
    keep_result(result, out)
    for title, ways in zip(PARTS, (_text_ways, _label_ways, _picture_ways), strict=True):
        if config.only and title not in config.only:
            continue
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(title)
            continue
        for row in _measure(config, title, ways(config), result, began):
            result["rows"].append(row)
            if row["speedup"] is not None:
                result["ratios"][f"{title}: {row['way']}"] = row["speedup"]
            keep_result(result, out)
            say(_line(row))
    if config.ways and not result["rows"] and not result["left_out"]:
        raise ConfigError(
            "no way to measure has such a name", seen=", ".join(config.ways), do="leave --ways out to see all names"
        )
    result["seconds"] = time.monotonic() - began
    keep_result(result, out)
    return result


def _measure(
    config: ScoringBench, title: str, ways: Sequence[tuple[str, Way, int]], result: dict[str, Any], began: float
) -> Iterator[dict[str, Any]]:
    """Run each way over its first `number` prompts; the first way is the reference, where it is wanted."""
    device = torch.device(config.device)
    reference: list[Any] = []
    is_whole = _is_wanted(config, ways[0][0])
    answers: dict[str, list[Any]] = {}
    first_rate = 0.0
    for name, way, number in ways:
        if not _is_wanted(config, name):
            continue
        if time.monotonic() - began > config.seconds:
            result["left_out"].append(f"{title}: {name}")
            continue
        try:
            found: list[Any] = []
            with way.ready() if isinstance(way, Ours) else nullcontext():
                run = partial(_noted, way, found)
                took = [time_once(run, device) for _ in range(config.rounds)]
        except Exception as error:  # a way of others that cannot run here is a result, not an end
            result["left_out"].append(f"{title}: {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        reference = reference or found[0] if is_whole else []
        compared = min(len(reference), number)
        equal = sum(_is_equal(a, b) for a, b in zip(found[0][:compared], reference[:compared], strict=True))
        rate = number / statistics.median(took)
        first_rate = first_rate or (rate if is_whole else 0.0)
        answers[name] = found[0]
        yield {
            "what": title, "way": name, "samples_per_second": rate, "equal": equal, "compared": compared,
            "speedup": rate / first_rate if is_whole else None, **_same_bits(name, answers),
        }  # fmt: skip


def _is_wanted(config: ScoringBench, name: str) -> bool:
    return not config.ways or name.startswith(config.ways)


def _noted(way: Way, found: list[Any]) -> None:
    found.append(way())


def _same_bits(name: str, answers: dict[str, list[Any]]) -> dict[str, int]:
    """How many answers have the very same bits in other company, where that is promised."""
    one, other = answers.get(SHAPE), answers[name]
    return {"same_bits": sum(map(eq, one, other))} if name in (TURNED, ALONE) and one is not None else {}


def _is_equal(one: Any, other: Any) -> bool:
    """Texts token by token; label probabilities, which are small among so many words, within the noise of fp32."""
    if one and isinstance(one[0], float):
        return all(abs(a - b) <= 1e-4 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _text_ways(config: ScoringBench) -> list[tuple[str, Way, int]]:
    model = make_llama(torch.device(config.device), is_tiny=config.is_tiny)
    draw = random.Random(0)
    lengths = [min(1024, max(4, int(draw.lognormvariate(4.2, 0.9)))) for _ in range(config.texts)]
    prompts = text_prompts(lengths, 500)
    new, number = config.new_tokens, len(prompts)
    few = number if config.is_tiny else max(4, number // 8)
    at_once = number if config.device == "cuda" else 4  # on a CPU it takes seconds for each
    shared: dict[str, Any] = {"rows": 256, "cells": config.cells, "new_tokens": new}
    return [
        ("one by one, transformers", theirs(model, prompts[:few], size=1, side="left", new_tokens=new), few),
        ("8 padded right, transformers", theirs(model, prompts, size=8, side="right", new_tokens=new), number),
        ("8 padded left, transformers", theirs(model, prompts, size=8, side="left", new_tokens=new), number),
        ("pipeline(batch_size=8)", _pipeline(model, prompts, new), number),
        ("truebatch, planned", Ours(model, prompts, **shared), number),
        ("truebatch, level shape", Ours(model, prompts, is_pinned=True, **shared), number),
        ("generate_batch, transformers", _continuous(model, prompts[:at_once], new), at_once),
    ]


def _label_ways(config: ScoringBench) -> list[tuple[str, Way, int]]:
    return _vision_ways(config, 0)


def _picture_ways(config: ScoringBench) -> list[tuple[str, Way, int]]:
    return _vision_ways(config, config.new_tokens)


def _vision_ways(config: ScoringBench, new: int) -> list[tuple[str, Way, int]]:
    model = make_qwen(torch.device(config.device), is_tiny=config.is_tiny)
    prompts = picture_prompts(config.pictures, config.picture_tokens, config.side, 500)
    few = max(4, config.pictures // (64 if new else 4))
    ways: list[tuple[str, Way, int]] = []
    for size in (1, 4, 8, 32, 256):
        some = prompts[:few] if size == 1 else prompts[: max(few, 4 * size)]
        way = Ours(model, some, cells=config.cells if size > 8 else 10**6, rows=size, new_tokens=new)
        ways.append(("one by one" if size == 1 else f"at most {size} a batch", way, len(some)))
    if config.device == "cuda" and _is_wanted(config, "fitted budget"):
        cells, many = _fitted_cells(model, prompts, new), [*prompts, *map(_other, prompts)]
        fitted = Ours(model, many, cells=cells, rows=len(many), new_tokens=new)
        ways.append((f"fitted budget, {cells:,} cells", fitted, len(many)))
        ways.append(("fitted budget, compiled", replace(fitted, is_compiled=True), len(many)))
    shared: dict[str, Any] = {"rows": 256, "cells": config.cells, "new_tokens": new, "is_pinned": True}
    turned = Ours(model, prompts[::-1], **shared)
    ways.append((SHAPE, Ours(model, prompts, **shared), len(prompts)))
    ways.append((TURNED, lambda: turned()[::-1], len(prompts)))
    alone = [Ours(model, [one], **shared) for one in prompts[:4]]
    ways.append((ALONE, lambda: [answer for way in alone for answer in way()], len(alone)))
    return ways


def _other(prompt: ImagePrompt) -> ImagePrompt:
    """The same prompt with an image that counts as another, so that it is encoded again."""
    return replace(prompt, key=~prompt.key, image_hashes=(b"other" + prompt.image_hashes[0],))


def _fitted_cells(model: Any, prompts: Sequence[Any], new: int, limit_bytes: int | None = None) -> int:
    """The most cells of a batch that memory holds, measured as a run does it."""
    long = [grown(one, new) if new else one for one in prompts]
    unlimited: dict[str, Any] = {"cells": 10**9, "rows": len(prompts), "new_tokens": min(new, 1)}
    lengths = np.array([len(one.ids) + min(new, 1) for one in long], dtype=np.int64)
    return fit_prepared(lambda some: Ours(model, some, **unlimited)(), long, lengths, model, limit_bytes=limit_bytes)


def _pipeline(model: Any, prompts: Sequence[Any], new: int) -> Way:
    """transformers' pipeline, tokens handed over through a tokenizer whose words are numbers."""

    def run() -> list[Any]:
        tokenizer = _numbers(512)
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts = [" ".join(f"<{token}>" for token in prompt.ids) for prompt in prompts]
        found = pipe(texts, batch_size=8, max_new_tokens=new, do_sample=False, return_tensors=True)
        return [_behind(one[0]["generated_token_ids"], len(p.ids)) for one, p in zip(found, prompts, strict=True)]

    return run


def _continuous(model: Any, prompts: Sequence[Any], new: int) -> Way:
    def run() -> list[Any]:
        settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=2, pad_token_id=0)
        found = model.generate_batch(inputs=[list(p.ids) for p in prompts], generation_config=settings)
        ordered = [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]
        return [_new(one.generated_tokens, 0) for one in ordered]

    return run


def _behind(tokens: Any, length: int) -> tuple[int, ...]:
    """New tokens behind padding and a prompt of this length; no prompt holds the padding's id."""
    ids = [int(token) for token in tokens]
    padding = next((at for at, token in enumerate(ids) if token), 0)
    return _new(ids, padding + length)


def _new(tokens: Sequence[int], start: int) -> tuple[int, ...]:
    rest = [int(token) for token in tokens][start:]
    return tuple(rest[: rest.index(2)] if 2 in rest else rest)


def _numbers(size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(size)}, unk_token="<0>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<0>", "eos_token": "<2>", "unk_token": "<0>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def _overheads(config: ScoringBench) -> dict[str, float]:
    """CPU seconds to list and to plan samples, image sizes from headers, and the journal's share at 100 samples a second."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [str(folder / f"{n}.jpg") for n in range(100)]
        for n, file in enumerate(files):
            Image.effect_noise((160 + n, 120 + 2 * n), 60).convert("RGB").save(file)
        data = [{"user": f"{n} " + "w" * (n % 300), "images": [files[n % 100]]} for n in range(config.planned)]
        began = time.process_time()
        listed = list_samples(data)
        between = time.process_time()
        costs = {}
        for one in listed:
            assert one.asked is not None
            (height, width), words = image_sizes(one.asked.images)[0], len(one.asked.user)
            costs[one.key] = Cost(tokens=words // 4 + height * width // 784, patches=height * width // 196)
        measured = time.process_time()
        plan_batches(costs, Limits(cells=16_384))
        ended = time.process_time()
        share = _journal_share(folder, batches=30 if config.planned >= 10_000 else 6)
    return {
        "samples": float(config.planned), "keys_seconds": between - began, "costs_seconds": measured - between,
        "plan_seconds": ended - measured, "planning_seconds": ended - between, "journal_share_at_100_a_second": share,
    }  # fmt: skip


def _journal_share(folder: Path, rows: int = 32, batches: int = 30) -> float:
    """Seconds of the clock that the journal takes in a second of a run with 100 results a second, 32 a batch."""
    outcomes = [
        [Outcome(key=f"{b}-{r}", status="ok", score=0.5, output={"mass": 0.9, "text": "x" * 100}) for r in range(rows)]
        for b in range(batches)
    ]
    took = 0.0
    with open_journal(folder) as journal:
        for number, batch in enumerate(outcomes):
            began = time.perf_counter()
            journal.commit(journal.begin(number, [one.key for one in batch]), batch, seconds=0.1)
            spent = time.perf_counter() - began
            took += spent
            time.sleep(max(0.0, rows / 100 - spent))  # so that the disk is waited for as often as in a run
    return took / (rows * batches / 100)


def _line(row: dict[str, Any]) -> str:
    beside = "" if row["speedup"] is None else f" {row['speedup']:7.2f}x {row['equal']}/{row['compared']} equal"
    bits = f" {row['same_bits']} with the same bits" if "same_bits" in row else ""
    return f"{row['what']:18} {row['way']:30} {row['samples_per_second']:9.2f} samples/s{beside}{bits}"


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="tiny models and few samples: a dry run")
    numbers = ", ".join(f"{number} {part}" for number, part in enumerate(PARTS, 1))
    parser.add_argument("--only", type=int, nargs="+", choices=range(1, 4), help=f"parts to measure: {numbers}")
    parser.add_argument("--ways", nargs="+", default=(), help="how the names of the ways begin that are measured")
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    args = parser.parse_args()
    config = make_config(device=args.device, seconds=args.seconds, quick=args.quick)
    config = replace(config, only=tuple(PARTS[number - 1] for number in args.only or ()), ways=tuple(args.ways))
    try:
        run_bench(config, out=args.out, say=_say)
    except ConfigError as error:
        parser.error(str(error))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
