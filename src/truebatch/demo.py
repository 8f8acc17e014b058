"""The main job on embedded data: a small Chinese GPT trained one by one and in true batches, and the answers it gives.

texts -> padding by grouping -> one step cut in several ways -> two trainings, one curve -> longer training -> answers
All of it, with pictures, in one HTML file at the end.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from truebatch.democuts import TOLERANCE, compare_cuts, cut_one_step, largest_difference, run_cut, wrong_cuts
from truebatch.generation.settings import Generation
from truebatch.interruption import holding
from truebatch.language.saying import say
from truebatch.reports.charts import draw_curves
from truebatch.reports.findings import keep_picture, keep_table
from truebatch.reports.pictures import bars, curves
from truebatch.reports.report import REPORT, write_report
from truebatch.reports.tables import Table, print_table
from truebatch.systems.chinese_gpt.advice import padding_shares
from truebatch.systems.chinese_gpt.characters import normalise
from truebatch.systems.chinese_gpt.dialogues import is_dialogue, question_and_answer
from truebatch.systems.chinese_gpt.facts import KINDS
from truebatch.systems.chinese_gpt.generating import continue_texts
from truebatch.systems.chinese_gpt.model import ChineseGPT, ModelShape
from truebatch.systems.chinese_gpt.objective import NextToken
from truebatch.systems.chinese_gpt.preparing import Prepared, prepare
from truebatch.systems.chinese_gpt.samples import FIELDS, Encoded
from truebatch.systems.chinese_gpt.settings import ChineseGPTConfig
from truebatch.training.job import TrainResult
from truebatch.training.loop import train
from truebatch.training.settings import TrainConfig
from truebatch.training.task import TrainData

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
    """Print the four parts of the demo; True if true batches gave what one by one gives in all of them.

    The report of it all is written to `out`; that of an earlier demo is written over, and nothing else is left behind.
    """
    began = time.perf_counter()
    ready = prepare(size.corpus)
    with _one_thread(), holding(), tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "demo"
        _show_padding(ready, size, run)
        samples = _dialogues(ready.train)
        faults = _show_cuts(samples, _model(ready, size, seed), size, seed, run)
        faults += _show_curves(samples, ready, size, seed, run)
        faults += _show_answers(ready, size, seed, run)
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


@contextmanager
def _one_thread() -> Iterator[None]:
    # A model this small gains little from threads, and on a busy machine they wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _dialogues(part: Encoded) -> list[dict[str, Any]]:
    return [part[i] for i, text in enumerate(part.texts) if is_dialogue(text.text)]


def _model(ready: Prepared, size: DemoSize, seed: int) -> ChineseGPT:
    shape = ModelShape(
        vocabulary=len(ready.vocab), embedding_dim=size.width, hidden_dim=2 * size.width, heads=4, dropout=0.1
    )
    return ChineseGPT(shape, seed=seed, vocab=ready.vocab)


def _show_padding(ready: Prepared, size: DemoSize, run: Path) -> None:
    """What each grouping wastes, for statements and for dialogues."""
    batch, width = size.samples_per_step, size.corpus.max_seq_len
    rows = []
    for name, wanted in (("statements", False), ("dialogues", True)):
        lengths = ready.train.lengths[[is_dialogue(text.text) == wanted for text in ready.train.texts]]
        shares = padding_shares(lengths, batch, fixed=width)
        each = (shares.fixed, shares.dynamic, shares.bucketed, shares.packed)
        about = f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}"
        rows.append((name, f"{len(lengths):,}", about, *(f"{share:.1%}" for share in each)))
    header = ("embedded texts", "samples", "tokens", f"fixed {width}", "dynamic", "bucketed", "packed")
    table = Table(header, tuple(rows), f"1. Cells that hold nothing but padding, {batch} samples a forward pass")
    print_table(table)
    keep_table(run, "10-padding", table)


def _show_cuts(samples: Sequence[Any], model: ChineseGPT, size: DemoSize, seed: int, run: Path) -> list[str]:
    """One step of this model, cut in several ways."""
    cuts = cut_one_step(samples, samples_per_step=2 * size.samples_per_step, seed=seed)
    results = [run_cut(model.eval(), cut) for cut in cuts]
    title = f"2. One step of {2 * size.samples_per_step} dialogues, cut in several ways; differences are relative"
    _write(f"\n{title}")
    table = compare_cuts(results)
    print_table(table)
    keep_table(run, "20-cuts", replace(table, title=title))
    wrong = wrong_cuts(results)
    if not wrong:
        _write(f"   at most {largest_difference(results):.1e}, {TOLERANCE:.0e} is allowed; the last line is the usual")
        _write("   mistake, shown on purpose")
    return wrong


def _train(samples: Sequence[Any], model: ChineseGPT, config: TrainConfig, *, out: Path | None = None) -> TrainResult:
    return train(model, NextToken(), TrainData(samples=samples, fields=FIELDS), config, out=out)


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


def _show_curves(samples: Sequence[Any], ready: Prepared, size: DemoSize, seed: int, run: Path) -> list[str]:
    """The same training one by one and in true batches: the same samples a step, dropout and all."""
    batched = _settings(size, seed)
    alone = replace(batched, true_batch="off", layout="padded", cells=None)
    records = {
        name: _train(samples, _model(ready, size, seed), config).records
        for name, config in ((ONE, alone), (MANY, batched))
    }
    losses = {name: [float(record["loss"]) for record in all_] for name, all_ in records.items()}
    title = (
        f"3. {size.compared_steps} steps of {size.samples_per_step} dialogues, trained twice: the loss of every step"
    )
    _write(f"\n{title}")
    for line in draw_curves(losses):
        _write(line)
    apart = [abs(a - b) / abs(a) for a, b in zip(losses[ONE], losses[MANY], strict=True)]
    table = _curve_table(losses, apart)
    print_table(table)
    # The middle step: on a busy machine a few take far longer.
    speed = {
        name: size.samples_per_step / statistics.median(r["seconds"] for r in all_) for name, all_ in records.items()
    }
    one, many = speed[ONE], speed[MANY]
    _write(f"   samples a second: one by one {one:.0f}, true batches {many:.0f}: {many / one:.1f} x")
    keep_table(run, "30-trained-twice", replace(table, title=title))
    _keep_pictures(run, losses, speed)
    return [f"the loss differs by {max(apart):.1e}, {TOLERANCE:.0e} is allowed"] * (max(apart) > TOLERANCE)


def _keep_pictures(run: Path, losses: dict[str, list[float]], speed: dict[str, float]) -> None:
    if _can_draw():
        steps = range(1, len(losses[ONE]) + 1)
        lines = {name: (list(steps), values) for name, values in losses.items()}
        keep_picture(run, "31-both-losses", curves(lines, title="one on top of the other", x="step", y="loss"))
        keep_picture(run, "32-speed", bars(speed, title="training, one thread", y="samples a second"))


def _curve_table(losses: dict[str, list[float]], apart: Sequence[float]) -> Table:
    last = len(apart) - 1
    shown = sorted({0, last // 3, 2 * last // 3, last})
    rows = tuple((str(at + 1), f"{losses[ONE][at]:.6f}", f"{losses[MANY][at]:.6f}", f"{apart[at]:.1e}") for at in shown)
    return Table(("step", ONE, MANY, "difference"), rows)


def _show_answers(ready: Prepared, size: DemoSize, seed: int, run: Path) -> list[str]:
    """A longer training in true batches, and answers to questions it has not seen; all at once, and one by one."""
    samples = [ready.train[i] for i, text in enumerate(ready.train.texts) if _is_about(text.text, size)]
    held = [text.text for part in (ready.test, ready.validation) if part is not None for text in part.texts]
    pairs = dict(question_and_answer(text) for text in held if _is_about(text, size))
    model, began = _model(ready, size, seed), time.perf_counter()
    config = replace(_settings(size, seed), max_steps=size.steps, schedule="cosine", learning_rate=5e-3)
    loss = _train(samples, model, config, out=run).records[-1]["loss"]
    seconds = time.perf_counter() - began
    title = f"4. {size.steps} steps in true batches on dialogues about {'、'.join(size.about)}: {seconds:.0f} s"
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
    _write(f"   all answers together: {rate:.1f} x as many a second as one by one")
    return ["answers given together and one by one differ"] * (alone != answers[: len(some)])


def _is_about(text: str, size: DemoSize) -> bool:
    things = [thing for kind in KINDS if kind.name in size.about for thing in kind.things]
    return is_dialogue(text) and any(thing in text for thing in things)


def _timed_answers(model: ChineseGPT, questions: Sequence[str], *, rows: int) -> tuple[list[str], float]:
    began, settings = time.perf_counter(), Generation(max_new_tokens=64, temperature=0)
    answers = continue_texts(model.eval(), questions, settings, rows=rows)
    return answers, time.perf_counter() - began


def _write(text: str) -> None:
    say(text)
    sys.stdout.flush()
