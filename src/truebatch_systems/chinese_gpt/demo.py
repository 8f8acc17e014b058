"""One step of the demo, cut in several ways: outputs and gradients of each beside those of one by one.

samples -> plans -> micro-batches -> forward and backward -> differences

The main job on embedded data: a small Chinese GPT trained one by one and in true batches, and the answers it gives.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from truebatch.batch.chunked_cross_entropy import IGNORE
from truebatch.batch.collate import collate
from truebatch.batch.fields import Side
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import LawError
from truebatch.generation.config import Generation
from truebatch.interrupts import holding
from truebatch.language.console import say
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Layout, Rows, padded_rows
from truebatch.progress import stage
from truebatch.reports.artifacts import keep_picture, keep_table
from truebatch.reports.plots import bars, curves
from truebatch.reports.report import REPORT, write_report
from truebatch.reports.tables import Table, print_table
from truebatch.reports.terminal_chart import draw_curves
from truebatch.training.config import TrainConfig
from truebatch.training.context import TrainResult
from truebatch.training.data import TrainData
from truebatch.training.logging.stage_logger import StageLogger
from truebatch.training.trainer import train
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.characters import normalise
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue, question_and_answer
from truebatch_systems.chinese_gpt.data.prepare import PreparedTexts, prepare
from truebatch_systems.chinese_gpt.data.samples import FIELDS, EncodedTexts
from truebatch_systems.chinese_gpt.data.toy_corpus import KINDS
from truebatch_systems.chinese_gpt.demo_fault import show_fault
from truebatch_systems.chinese_gpt.demo_speed import BY_CPU_TIME, CpuClock, cpu_seconds, one_thread, write_reasons
from truebatch_systems.chinese_gpt.model.generate import continue_texts
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.train.batch_advice import padding_shares
from truebatch_systems.chinese_gpt.train.objective import NextToken

TOLERANCE = 1e-5
"""Relative difference of fp32 results that is promised; rounding in another order of sums stays far below."""

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DemoCut:
    """One way to run the samples of a step."""

    name: str
    batches: tuple[MicroBatch, ...]
    is_right: bool = True
    """False for the mistake that is shown on purpose: the mean of the means of micro-batches."""


@dataclass(frozen=True, slots=True)
class CutResult:
    """What a cut gave."""

    cut: DemoCut
    outputs: Tensor
    """[n, V] logits of all tokens of the step, samples in order of their ids."""
    gradients: Tensor
    """All gradients as one vector."""
    seconds: float
    """The quickest of a few forward and backward passes over the whole step."""


def cut_one_step(samples: Sequence[Sample], *, samples_per_step: int, seed: int) -> list[DemoCut]:
    """The first step of a plan, one by one and in true batches; the same samples in every cut."""
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    cells = 32 * samples_per_step

    def batches(rows: Sequence[Rows], side: Side = "right") -> tuple[MicroBatch, ...]:
        return tuple(collate([samples[i] for i in r.ids], r, FIELDS, side=side) for r in rows if r.num_samples)

    def planned(most: int, layout: Layout, ranks: int = 1) -> list[Rows]:
        config = PlanConfig(cells=most, layout=layout, samples_per_step=samples_per_step, seed=seed)
        step = build_plan(lengths, config, ranks=ranks).step(0)
        return [rows for rank in step for rows in rank]

    padded, packed, pieces = planned(cells, "padded"), planned(cells, "packed"), planned(cells // 4, "packed", 3)
    ids = sorted(int(i) for rows in packed for i in rows.ids)
    return [
        DemoCut("one by one", batches([padded_rows(np.array([i]), int(lengths[i])) for i in ids])),
        DemoCut("padded right", batches(padded)),
        DemoCut("padded left", batches(padded, "left")),
        DemoCut("packed rows", batches(packed)),
        DemoCut("packed rows, 3 ranks", batches(pieces)),
        DemoCut("mean of means (wrong)", batches(pieces), is_right=False),
    ]


@stage("running a step in one of its cuts")
def run_cut(model: ChineseGPT, cut: DemoCut, *, repeats: int = 3) -> CutResult:
    """Forward and backward over all micro-batches; each loss is a sum, divided once by the count of the step."""
    counts = [int((batch["labels"] != IGNORE).sum()) for batch in cut.batches]
    divisors = [sum(counts)] * len(counts) if cut.is_right else [count * len(counts) for count in counts]
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        outputs: dict[int, Tensor] = {}
        began = cpu_seconds()
        for batch, divisor in zip(cut.batches, divisors, strict=True):
            logits = model(batch["input_ids"], batch.positions, batch.segments)
            torch.autograd.backward(_sum(logits, batch) / divisor)
            outputs |= zip(batch.sample_ids, batch.per_sample(logits.detach()), strict=True)
        seconds.append(cpu_seconds() - began)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return CutResult(cut, torch.cat([outputs[i] for i in sorted(outputs)]), gradients, min(seconds))


def _sum(logits: Tensor, batch: MicroBatch) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def compare_cuts(results: Sequence[CutResult]) -> Table:
    """Every cut beside one by one, which is the first result."""
    header = ("cut", "micro-batches", "cells", "outputs", "gradients", "speed")
    return Table(header, tuple(_line(result, results[0]) for result in results))


def _line(result: CutResult, alone: CutResult) -> tuple[str, ...]:
    is_alone = result is alone
    return (
        result.cut.name,
        str(len(result.cut.batches)),
        f"{sum(batch.is_real.numel() for batch in result.cut.batches):,}",
        "-" if is_alone else f"{difference(result.outputs, alone.outputs):.1e}",
        "-" if is_alone else f"{difference(result.gradients, alone.gradients):.1e}",
        f"{alone.seconds / result.seconds:.1f} x",
    )


def difference(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||."""
    return float((ours - reference).norm() / reference.norm())


def _apart(result: CutResult, alone: CutResult) -> float:
    outputs = difference(result.outputs, alone.outputs)
    return max(outputs, difference(result.gradients, alone.gradients))


def largest_difference(results: Sequence[CutResult]) -> float:
    """How far the right cuts are from one by one at most."""
    return max(_apart(result, results[0]) for result in results[1:] if result.cut.is_right)


def wrong_cuts(results: Sequence[CutResult]) -> list[str]:
    """Right cuts that are not equal to one by one, and a mistake that was not seen."""
    return [r.cut.name for r in results[1:] if (_apart(r, results[0]) <= TOLERANCE) != r.cut.is_right]


ONE, MANY = "one by one", "true batches"
FOLDER = Path("runs/demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """How much is shown; a test shows less."""

    corpus: ChineseGPTConfig = field(default_factory=ChineseGPTConfig)
    width: int = 128
    samples_per_step: int = 16
    compared_steps: int = 24
    steps: int = 300
    """Of the training whose answers are shown."""
    about: tuple[str, ...] = ("动物", "水果")
    """What that training and its questions are about: few enough facts to be learned in seconds."""
    answers: int = 5


FULL = DemoSize()


def run_demo(*, seed: int = 0, size: DemoSize = FULL, out: Path = FOLDER) -> bool:
    """Print the five parts of the demo; True if true batches gave what one by one gives in all of them.

    The report of it all is written to `out`; that of an earlier demo is written over, and nothing else is left behind.
    """
    began = time.perf_counter()
    ready = prepare(size.corpus)
    with one_thread(), holding(), tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "demo"
        _show_padding(ready, size, run)
        samples = _dialogues(ready.train)
        faults = show_fault(samples, _model(ready, size, seed))
        faults += _show_cuts(samples, _model(ready, size, seed), size, seed, run)
        try:
            faults += _show_curves(samples, ready, size, seed, run)
            faults += _show_answers(ready, size, seed, run)
        except LawError as error:  # every training checks itself
            faults.append(f"the training stopped before its first update: {error.seen}")
        report = _report(run, out)
    if faults:
        _write(f"\nNOT EQUAL to one by one: {'; '.join(faults)}")
    else:
        _write(f"\nEqual to one by one in every part. {time.perf_counter() - began:.0f} seconds in all.")
    _write(report)
    _write("next: truebatch train chinese_gpt, then: truebatch generate runs/chinese_gpt")
    return not faults


def _report(run: Path, out: Path) -> str:
    if not _can_draw():
        return "report: none, as it needs matplotlib: pip install 'truebatch[report]'"
    return f"report: {write_report([run], out / REPORT)}"


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _dialogues(part: EncodedTexts) -> list[dict[str, Any]]:
    return [part[i] for i, text in enumerate(part.texts) if is_dialogue(text.text)]


def _model(ready: PreparedTexts, size: DemoSize, seed: int) -> ChineseGPT:
    shape = ModelShape(
        vocabulary=len(ready.vocab), embedding_dim=size.width, hidden_dim=2 * size.width, heads=4, dropout=0.1
    )
    return ChineseGPT(shape, seed=seed, vocab=ready.vocab)


def _show_padding(ready: PreparedTexts, size: DemoSize, run: Path) -> None:
    """What each grouping wastes, for statements and for dialogues."""
    batch, width = size.samples_per_step, size.corpus.max_seq_len
    rows = []
    for name, wanted in (("embedded statements", False), ("embedded dialogues", True)):
        lengths = ready.train.lengths[[is_dialogue(text.text) == wanted for text in ready.train.texts]]
        shares = padding_shares(lengths, batch, fixed=width)
        each = (shares.fixed, shares.dynamic, shares.bucketed, shares.packed)
        about = f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}"
        rows.append((name, f"{len(lengths):,}", about, *(f"{share:.1%}" for share in each)))
    header = ("texts", "samples", "tokens", f"fixed {width}", "dynamic", "bucketed", "packed")
    table = Table(header, tuple(rows), f"1. Cells that hold nothing but padding, {batch} samples per forward pass")
    print_table(table)
    keep_table(run, "10-padding", table)


def _show_cuts(samples: Sequence[Any], model: ChineseGPT, size: DemoSize, seed: int, run: Path) -> list[str]:
    """One step of this model, cut in several ways."""
    cuts = cut_one_step(samples, samples_per_step=2 * size.samples_per_step, seed=seed)
    results = [run_cut(model.eval(), cut) for cut in cuts]
    title = f"3. One step of {2 * size.samples_per_step} dialogues, cut in several ways; differences are relative"
    _write(f"\n{title}")
    table = compare_cuts(results)
    print_table(table)
    _write(BY_CPU_TIME)
    write_reasons(_write, _speeds(results), tokens=_cells(results[0]))
    keep_table(run, "20-cuts", replace(table, title=title))
    wrong = wrong_cuts(results)
    if not wrong:
        _write(
            f"   at most {largest_difference(results):.1e}, {TOLERANCE:.0e} is allowed; "
            "the last line is a common mistake, shown on purpose"
        )
    return wrong


def _cells(result: CutResult) -> int:
    return sum(batch.is_real.numel() for batch in result.cut.batches)


def _speeds(results: Sequence[CutResult]) -> list[tuple[str, float, int]]:
    return [(r.cut.name, results[0].seconds / r.seconds, _cells(r)) for r in results[1:] if r.cut.is_right]


def _train(
    samples: Sequence[Any], model: ChineseGPT, config: TrainConfig, *, out: Path | None = None, clock: CpuClock | None = None
) -> TrainResult:  # fmt: skip
    data, clocks = TrainData(samples=samples, fields=FIELDS), () if clock is None else (clock,)
    with stage("training, steps") as training:
        result = train(model, NextToken(), data, config, out=out, loggers=(*clocks, StageLogger(training)))
    result.raise_if_interrupted()
    return result


def _settings(size: DemoSize, seed: int) -> TrainConfig:
    """True batches: packed rows, the steps of a plain run with 16 samples each."""
    return TrainConfig(
        samples_per_step=size.samples_per_step,
        cells=64 * size.samples_per_step,
        layout="packed",
        learning_rate=2e-3,
        warmup_steps=20,
        max_steps=size.compared_steps,
        epochs=10_000,
        seed=seed,
    )


def _show_curves(samples: Sequence[Any], ready: PreparedTexts, size: DemoSize, seed: int, run: Path) -> list[str]:
    """The same training one by one and in true batches: the same samples per step, dropout and all."""
    batched = _settings(size, seed)
    alone = replace(batched, true_batch="off", layout="padded", cells=None)
    clocks = {ONE: CpuClock(), MANY: CpuClock()}
    records = {
        name: _train(samples, _model(ready, size, seed), config, clock=clocks[name]).records
        for name, config in ((ONE, alone), (MANY, batched))
    }
    losses = {name: [float(record["loss"]) for record in all_] for name, all_ in records.items()}
    title = (
        f"4. {size.compared_steps} steps of {size.samples_per_step} dialogues, trained twice: the loss of every step"
    )
    _write(f"\n{title}")
    for line in draw_curves(losses):
        _write(line)
    apart = [abs(a - b) / abs(a) for a, b in zip(losses[ONE], losses[MANY], strict=True)]
    table = _curve_table(losses, apart)
    print_table(table)
    speed = {name: size.samples_per_step / clock.usual_step() for name, clock in clocks.items()}
    one, many = speed[ONE], speed[MANY]
    _write(f"   samples per second of CPU time: one by one {one:.0f}, true batches {many:.0f}: {many / one:.1f} x")
    write_reasons(_write, [(MANY, many / one, 1)], tokens=1)  # packed rows: no padding
    keep_table(run, "30-trained-twice", replace(table, title=title))
    _keep_pictures(run, losses, speed)
    return [f"the loss differs by {max(apart):.1e}, {TOLERANCE:.0e} is allowed"] * (max(apart) > TOLERANCE)


def _keep_pictures(run: Path, losses: dict[str, list[float]], speed: dict[str, float]) -> None:
    if _can_draw():
        steps = range(1, len(losses[ONE]) + 1)
        lines = {name: (list(steps), values) for name, values in losses.items()}
        keep_picture(run, "31-both-losses", curves(lines, title="one on top of the other", x="step", y="loss"))
        keep_picture(run, "32-speed", bars(speed, title="training, one thread", y="samples per second"))


def _curve_table(losses: dict[str, list[float]], apart: Sequence[float]) -> Table:
    last = len(apart) - 1
    shown = sorted({0, last // 3, 2 * last // 3, last})
    rows = tuple((str(at + 1), f"{losses[ONE][at]:.6f}", f"{losses[MANY][at]:.6f}", f"{apart[at]:.1e}") for at in shown)
    return Table(("step", ONE, MANY, "difference"), rows)


def _show_answers(ready: PreparedTexts, size: DemoSize, seed: int, run: Path) -> list[str]:
    """A longer training in true batches, and answers to questions it has not seen; all at once, and one by one."""
    samples = [ready.train[i] for i, text in enumerate(ready.train.texts) if _is_about(text.text, size)]
    held = [text.text for part in (ready.test, ready.validation) if part is not None for text in part.texts]
    pairs = dict(question_and_answer(text) for text in held if _is_about(text, size))
    model, began = _model(ready, size, seed), time.perf_counter()
    config = replace(_settings(size, seed), max_steps=size.steps, schedule="cosine", learning_rate=5e-3)
    loss = _train(samples, model, config, out=run).records[-1]["loss"]
    seconds = time.perf_counter() - began
    title = f"5. {size.steps} steps in true batches on dialogues about {'、'.join(size.about)}: {seconds:.0f} s"
    _write(f"\n{title}")
    questions = sorted(pairs, key=len)
    answers, together = _timed_answers(model, questions, rows=len(questions))
    some = questions[: 4 * size.answers]
    alone, one = _timed_answers(model, some, rows=1)
    is_right = [normalise(mine) == normalise(pairs[asked]) for asked, mine in zip(questions, answers, strict=True)]
    shown = list(zip(questions, answers, is_right, strict=True))[: size.answers]
    rows = tuple((asked, mine, "yes" if right else f"no: {pairs[asked]}") for asked, mine, right in shown)
    keep_table(run, "40-answers", Table(("question", "answer", "right"), rows, title))
    for asked, mine, right in shown:
        _write(f"   {asked}{mine}" + ("" if right else f"   (expected: {pairs[asked]})"))
    _write(f"   right, word for word: {sum(is_right)} of {len(pairs)} questions it was not trained on; loss {loss:.3f}")
    rate = (len(questions) / together) / (len(some) / one)
    _write(f"   all answers together: {rate:.1f} x as many per second of CPU time as one by one")
    write_reasons(_write, [("all answers together", rate, 1)], tokens=1)
    return ["answers given together and one by one differ"] * (alone != answers[: len(some)])


def _is_about(text: str, size: DemoSize) -> bool:
    things = [thing for kind in KINDS if kind.name in size.about for thing in kind.things]
    return is_dialogue(text) and any(thing in text for thing in things)


def _timed_answers(model: ChineseGPT, questions: Sequence[str], *, rows: int) -> tuple[list[str], float]:
    began, settings = cpu_seconds(), Generation(max_new_tokens=64, temperature=0)
    answers = continue_texts(model.eval(), questions, settings, rows=rows)
    return answers, cpu_seconds() - began


def _write(text: str) -> None:
    say(text)
    sys.stdout.flush()
