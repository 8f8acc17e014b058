"""Real weights: the same answers one by one and in batches, in fp32 and bf16, by level; counted, not assumed.

    python -m tests.real.weights .real/smollm2      # SmolLM2-135M-Instruct as a model folder; `make real` first
    python -m benchmarks scoring_real --model .real/smollm2 --out docs/results/scoring_smollm2_cpu.json

Prompts are docstrings of Python's standard library, as people wrote them: short and long, in the order of a hash. Every
row is two runs of the scoring room into folders of their own, one with a sample a batch and one with planned batches.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from truebatch.generation.config import Generation
from truebatch.hf.load import load_model
from truebatch.scoring.backends.load import DTYPES, choose_device, load_processor
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Level, Limits
from truebatch.scoring.readouts import Generate, Labels, Readout
from truebatch.scoring.scorer import Scorer

MODULES = (
    "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "collections", "configparser", "contextlib", "copy",
    "csv", "datetime", "decimal", "difflib", "email.message", "fractions", "functools", "heapq", "http.client", "inspect",
    "io", "ipaddress", "itertools", "json", "logging", "math", "os", "pathlib", "pickle", "random", "re", "shutil",
    "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "typing",
    "unittest", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
SHORTEST, LONGEST = 20, 900
"""Letters of a docstring that is taken."""
TEN = Labels({str(n): n for n in range(1, 11)})
ASKS = {"labels": "From 1 to 10, how clear is this text?\n\n", "texts": "Say in one sentence what this does:\n\n"}
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RealBench:
    """What is measured."""

    model: str
    device: str = "cpu"
    prompts: int = 500
    half_prompts: int = 100
    """In bf16; one by one at level `shape` takes as long as whole batches do."""
    new_tokens: int = 8
    cells: int = 2048
    threads: int = 1


def run_bench(config: RealBench, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure every row; the result is written after each."""
    if config.device == "cpu":
        torch.set_num_threads(config.threads)
    result: dict[str, Any] = {
        "rows": [],
        **origin(config, "transformers", command=command_line("benchmarks.scoring.real_weights")),
    }
    began = time.monotonic()
    result["prompts"] = _lengths(config)
    for row in _rows(config):
        result["rows"].append(row)
        keep_result(result, out)
        say(json.dumps(row))
    result["seconds"] = round(time.monotonic() - began)
    keep_result(result, out)
    return result


def _rows(config: RealBench) -> Iterator[dict[str, Any]]:
    cases: list[tuple[str, Level, int]] = [
        ("float32", "close", config.prompts), ("bfloat16", "close", config.half_prompts),
        ("bfloat16", "shape", config.half_prompts),
    ]  # fmt: skip
    folder = Path(config.model)
    model, processor = load_model(folder).to(choose_device(config.device)), load_processor(folder)
    for dtype, level, number in cases:
        model.to(DTYPES[dtype])
        for what in ASKS:
            yield {"dtype": dtype, **_compare(config, (model, processor), what, level, number)}


def _compare(config: RealBench, loaded: tuple[Any, Any], what: str, level: Level, number: int) -> dict[str, Any]:
    """A row: the same prompts one by one and in batches."""
    asked = real_prompts(number, ASKS[what])
    alone, slow = _judged(config, loaded, asked, what, Limits(level=level, cells=config.cells, rows=1))
    together, fast = _judged(config, loaded, asked, what, Limits(level=level, cells=config.cells))
    pairs = list(zip(alone, together, strict=True))
    found = {
        "what": what, "level": level, "samples": len(pairs),
        "equal": sum(_is_equal(a, b) for a, b in pairs), "same_bits": sum(a["output"] == b["output"] for a, b in pairs),
    }  # fmt: skip
    if what == "labels":
        found["same_likeliest"] = sum(_likeliest(a) == _likeliest(b) for a, b in pairs)
        found["largest_difference"] = max(abs(a["score"] - b["score"]) for a, b in pairs)
    return {**found, "seconds_alone": slow, "seconds_together": fast, "speedup": slow / fast}


def _judged(
    config: RealBench, loaded: tuple[Any, Any], asked: Sequence[Any], what: str, limits: Limits
) -> tuple[list[dict[str, Any]], float]:
    """Rows in the order of the prompts, and seconds: of this process's CPU, or of the clock on a GPU."""
    clock = time.process_time if config.device == "cpu" else time.monotonic
    readout: Readout = TEN
    if what == "texts":
        readout = Generate(Generation(max_new_tokens=config.new_tokens, temperature=0.0))
    backend = model_backend(*loaded, readout, limits)
    with tempfile.TemporaryDirectory() as folder:
        began = clock()
        done = Scorer(backend, limits=limits).score(asked, folder, check=False)
        seconds = clock() - began
        rows = list(done.rows())
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        raise AssertionError(f"{len(bad)} samples failed: {bad[0]['message']}")
    return rows, seconds


def real_prompts(number: int, ask: str) -> list[dict[str, str]]:
    """Docstrings of the standard library behind a question, each once, in the order of a hash."""
    texts = {text: hashlib.blake2b(text.encode(), digest_size=8).digest() for text in _docstrings()}
    chosen = sorted(texts, key=lambda text: texts[text])[:number]
    return [{"id": f"p{n}", "user": ask + text} for n, text in enumerate(chosen)]


def _docstrings() -> Iterator[str]:
    for name in MODULES:
        module = importlib.import_module(name)
        for _, found in inspect.getmembers(module, callable):
            own = [found, *(v for _, v in inspect.getmembers(found, callable))] if inspect.isclass(found) else [found]
            for one in own:
                text = inspect.getdoc(one) or ""
                if SHORTEST <= len(text) <= LONGEST:
                    yield text


def _lengths(config: RealBench) -> dict[str, int]:
    found = sorted(len(one["user"]) for one in real_prompts(config.prompts, ASKS["labels"]))
    quantiles = {"shortest": 0, "median": len(found) // 2, "longest": len(found) - 1}
    return {"number": len(found), **{f"{name}_letters": found[at] for name, at in quantiles.items()}}


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Texts letter by letter; expected values of labels within the noise of fp32."""
    if "text" in one["output"]:
        return bool(one["output"]["text"] == other["output"]["text"])
    return bool(abs(one["score"] - other["score"]) < 1e-4)


def _likeliest(row: dict[str, Any]) -> str:
    chances = row["output"]["probabilities"]
    return str(max(chances, key=lambda label: chances[label]))


def main() -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder with a tokenizer")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--half-prompts", type=int, default=100, help="prompts in bf16")
    parser.add_argument("--cells", type=int, default=2048, help="most tokens of a batch")
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    args = parser.parse_args()
    config = RealBench(
        model=args.model, device=args.device, prompts=args.prompts, half_prompts=args.half_prompts, cells=args.cells
    )
    run_bench(config, out=args.out, say=lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
