"""The front door: a model, a readout and a run folder; scores in the order of the samples, failures by name.

Scorer(model, readout).score(samples, "runs/a") -> ScoreRun: scores, errors, rows, stats
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from truebatch.errors import ConfigError, DataError
from truebatch.html_repr import html_table
from truebatch.interrupts import holding
from truebatch.io.atomic_files import corrupt_file_errors, read_json, write_json
from truebatch.progress import stage
from truebatch.scoring.backends.function import FunctionBackend
from truebatch.scoring.backends.interface import Backend, SampleError, ScoreRequest, slower_ways
from truebatch.scoring.batch_plan import Limits, plan_batches
from truebatch.scoring.bisect import FailureStats, failure, judge_ready
from truebatch.scoring.equality_check import IdentityReport, check_identity, refuse
from truebatch.scoring.memory_budget import budget_of, settle_limits
from truebatch.scoring.prefetch import attempt
from truebatch.scoring.readouts import Readout
from truebatch.scoring.runner import RunConfig, RunTotals, cost_all, end_early, run_samples
from truebatch.scoring.store.export import Row, Status, export, make_row, read_rows, read_status
from truebatch.scoring.store.input_index import InputSample, by_key, list_samples
from truebatch.scoring.store.outcome import Outcome
from truebatch.scoring.stream import Give, stream
from truebatch.scoring.windows import WINDOW, end_windows, iter_windows, note_window, window_folder
from truebatch.training.run_dir.signals import catch_signals

Model = str | Path | nn.Module | Callable[..., Any] | Backend | Sequence[Backend]
Samples = Path | str | Iterable[Any]
Ask = Callable[[Any, Any, dict[str, Any]], Any]
"""(prompt, completion, the other columns of the row) -> a sample: a dict, messages, or `Asked`."""
CHECK = "check.json"
SHOWN = 20
"""Rows that a notebook shows."""
CHECKED = 8
"""Samples that are judged alone and together before a run."""
MOST_FITTED = 2048
"""Samples from which the budget is found, spread over the first window."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample without a result."""

    index: int
    id: str
    stage: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ScoreRun:
    """The results of a run; everything is read from its folder."""

    folder: Path
    report: IdentityReport | None
    """Of the check before the run."""
    finished: RunTotals | None = None
    reused: dict[str, float] = field(default_factory=dict)
    """Prefix tokens and images that the backends did not run again."""
    slower: tuple[str, ...] = ()
    """Quick ways that a model was found not to allow, and why."""

    @property
    def scores(self) -> NDArray[np.float64]:
        """[N] in the order of the samples; NaN where there is no score."""
        return np.array([np.nan if row["score"] is None else row["score"] for row in self.rows()], dtype=np.float64)

    @property
    def errors(self) -> list[Failure]:
        """Every sample that failed."""
        names = ("index", "id", "stage", "kind", "message")
        return [Failure(*(row[name] for name in names)) for row in self.rows() if row["status"] == "failed"]

    @property
    def status(self) -> Status:
        """Counts."""
        return read_status(self.folder)

    @property
    def stats(self) -> dict[str, float]:
        """What this call did: samples and seconds, calls of the model, splits and bisections."""
        if self.finished is None:
            return {}
        done, seconds = self.finished, max(self.finished.seconds, 1e-9)
        return {
            **self.reused, "judged": done.judged, "seconds": done.seconds, "samples_per_second": done.judged / seconds,
            "calls": done.trouble.calls, "oom_splits": done.trouble.splits, "bisections": done.trouble.bisections,
        }  # fmt: skip

    def rows(self) -> Iterator[Row]:
        """A row for every sample of the input, in order."""
        return read_rows(self.folder)

    def export(self, file: str | Path) -> int:
        """Write all rows as .jsonl, .csv or .parquet."""
        return export(self.folder, Path(file))

    def _repr_html_(self) -> str:
        names = ("index", "id", "status", "score", "kind", "message")
        rows = [tuple(row[name] for name in names) for row in islice(self.rows(), SHOWN)]
        status = self.status
        title = f"{status.samples:,} samples: {status.ok:,} done, {status.failed:,} failed, {status.pending:,} pending"
        return html_table(rows, header=names, title=title)


class Scorer:
    """Judges or generates for any number of samples in true batches; see `score`.

    >>> from truebatch import Scorer
    >>> scorer = Scorer(lambda samples: [len(sample.user) for sample in samples])
    >>> [outcome.score for outcome in scorer.judge([{"user": "short"}, {"user": "a longer one"}])]
    [5.0, 12.0]
    """

    def __init__(
        self, model: Model, readout: Readout | None = None, *,
        processor: Any = None, limits: Limits | None = None, dtype: str = "auto", device: str = "auto", reuse: bool = True,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        """`model`: a folder, a loaded model with its `processor`, a function from samples to numbers, or backends.

        `compiled`: on a GPU, the layers that read prompts are compiled, once, at the start.
        """
        self.limits = limits or Limits()
        several = list(model) if isinstance(model, list | tuple) else [model]
        options: dict[str, Any] = {"reuse_prefix": reuse, "reuse_images": reuse, "compiled": compiled}
        self.backends: Sequence[Backend] = [self._open(m, readout, processor, dtype, device, options) for m in several]

    def _open(
        self, model: Any, readout: Readout | None, processor: Any, dtype: str, device: str, options: dict[str, Any]
    ) -> Backend:
        if isinstance(model, nn.Module | str | Path):
            if readout is None:
                raise ConfigError(
                    "a model needs a readout", seen="readout=None", do="give YesNo(), Labels(...), Head() or Generate()"
                )
            local = import_module("truebatch.scoring.backends.load")  # a server's judge need not wait for transformers
            if isinstance(model, nn.Module):
                return cast(Backend, local.model_backend(model, processor, readout, self.limits, **options))
            return cast(Backend, local.open_backend(model, readout, self.limits, dtype=dtype, device=device, **options))
        if options["compiled"]:
            raise ConfigError("only a model is compiled", seen=f"a {type(model).__name__}", do="leave compiled out")
        if all(hasattr(model, name) for name in ("describe", "cost", "prepare", "judge", "close")):
            found: Backend = model
            return found
        if callable(model):
            return FunctionBackend(model)
        raise ConfigError(
            "this cannot judge", seen=f"a {type(model).__name__}", do="give a folder, a model or a function"
        )

    def check(self, samples: Samples, *, n: int = CHECKED, tolerance: float | None = None) -> IdentityReport:
        """Judge up to `n` samples alone and together, and say by how much they differ."""
        return _check(self.backends[0], list_samples(samples), n, tolerance)

    def score(
        self,
        samples: Samples,
        run: str | Path,
        *,
        check: bool | float = True,
        checked: int = CHECKED,
        how: RunConfig | None = None,
        window: int = WINDOW,
    ) -> ScoreRun:
        """Judge all samples that have no result in the run folder yet.

        If interrupted, the same call resumes; another configuration is refused, naming what differs. `check` judges
        `checked` samples alone and together first and refuses above the tolerance (or the one given); False leaves it out.
        Samples may be a generator of any length: they are planned and judged `window` at a time, and memory holds one.
        """
        report, finished = self._run(samples, Path(run), (check, checked), how or RunConfig(), window)
        return ScoreRun(Path(run), report, finished, _reused(self.backends), _slower(self.backends))

    def stream(
        self,
        samples: Samples,
        run: str | Path | None = None,
        *,
        check: bool | float = True,
        checked: int = CHECKED,
        how: RunConfig | None = None,
        window: int = WINDOW,
    ) -> Iterator[Row]:
        """The row of every sample as soon as it is judged, in no order; each has its `index` and `id`.

        `score` runs while you read: rows of an earlier call come first. Stop reading, and the run stops after the batches
        in flight; the same call resumes it. Without a run folder nothing is kept.
        """
        if run is None:
            with holding(), tempfile.TemporaryDirectory() as place:
                yield from self.stream(samples, place, check=check, checked=checked, how=how, window=window)
            return
        folder, places = Path(run), dict[str, list[InputSample]]()

        def work(give: Give) -> None:
            def add(outcomes: Sequence[Outcome]) -> None:
                give([make_row(place, one, self.limits.level) for one in outcomes for place in places.get(one.key, ())])

            self._run(samples, folder, (check, checked), replace(how or RunConfig(), on_outcomes=add), window, places)

        yield from stream(work)

    def _run(
        self, samples: Samples, folder: Path, checks: tuple[bool | float, int], how: RunConfig, window: int,
        places: dict[str, list[InputSample]] | None = None,
    ) -> tuple[IdentityReport | None, RunTotals]:  # fmt: skip
        """Window after window; `places` holds the samples of the present one by their keys."""
        report, finished, number, limits = None, None, 0, self.limits
        with catch_signals() if how.stop is None else nullcontext(how.stop) as stop:
            how = replace(how, stop=stop)
            windows = iter_windows(samples, window)
            while (listed := next(windows, None)) is not None:
                number += 1
                if finished is None:
                    folder.mkdir(parents=True, exist_ok=True)
                    limits = settle_limits(limits, folder, partial(_fit, self.backends[0], listed))
                    report = self._refuse_unequal(folder, listed, checks)
                else:
                    end_early(stop, folder, finished.judged)
                if places is not None:
                    places.clear()
                    places.update(by_key(listed))
                note_window(folder, number - 1, window)
                done = run_samples(listed, self.backends, window_folder(folder, number - 1), limits, how)
                finished = done if finished is None else finished.and_then(done)
                del listed  # before the next is read: memory holds one window
        if finished is None:
            raise DataError("there are no samples", seen=str(samples)[:100], do="name data with at least one")
        end_windows(folder, number, window)
        return report, finished

    def _refuse_unequal(
        self, folder: Path, listed: Sequence[InputSample], checks: tuple[bool | float, int]
    ) -> IdentityReport | None:
        """The report of the check before a run, which raises where batches would change answers."""
        check, number = checks
        if check is False:
            return None
        with _survived(folder, listed, number) as sound:
            report = _check(self.backends[0], sound, number, None if check is True else float(check))
        refuse(report)
        return report

    def judge(self, samples: Samples) -> list[Outcome]:
        """Outcomes in the order of the samples, without a run folder: for few samples, and inside of other programs."""
        listed = list_samples(samples)
        outcomes = {one.key: one.failure for one in listed if one.failure is not None}
        asked = {one.key: one.asked for one in listed if one.asked is not None}
        backend = self.backends[0]
        found = dict(zip(asked, cost_all(backend, list(asked.values())), strict=True))
        costs = {key: cost for key, cost in found.items() if not isinstance(cost, SampleError)}
        outcomes |= {key: failure(key, cost) for key, cost in found.items() if isinstance(cost, SampleError)}
        for batch in plan_batches(costs, self.limits) if costs else []:
            ready = [(key, attempt(backend.prepare, asked[key]), 0) for key in batch]
            outcomes |= {outcome.key: outcome for outcome in judge_ready(backend.judge, ready, FailureStats())}
        return [outcomes[one.key] for one in listed]

    def as_reward_function(
        self, ask: Ask | None = None, *, name: str = "truebatch"
    ) -> Callable[..., list[float | None]]:
        """A reward function as TRL's trainers call it: (prompts, completions, **columns) -> a number or None for each.

        A completion that cannot be judged gets None, which TRL leaves out; a reward is never invented. `ask` makes the
        sample to be judged; by default it is the conversation with the completion as its last message.
        """
        make = ask or _conversation

        def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
            rows = [{k: v[at] for k, v in columns.items() if _is_column(v, len(prompts))} for at in range(len(prompts))]
            samples = [make(p, c, row) for p, c, row in zip(prompts, completions, rows, strict=True)]
            return [outcome.score for outcome in self.judge(samples)]

        reward.__name__ = name
        return reward

    def close(self) -> None:
        """Give back what the backends hold."""
        for backend in self.backends:
            backend.close()


@contextmanager
def _survived(folder: Path, listed: Sequence[InputSample], checked: int) -> Iterator[list[InputSample]]:
    """Samples for a check, without those during whose check the process died: these are left for the journal."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CHECK
    with corrupt_file_errors(file, do="delete the file"):
        died = set(read_json(file)["died"]) if file.exists() else set()
    sound = [one for one in listed if one.key not in died]
    step = max(1, len(sound) // (16 * checked))
    chosen = sound[::step][: 32 * checked]
    write_json(file, {"died": sorted(died | {one.key for one in chosen})})
    try:
        yield chosen
    finally:  # an error is not a death
        write_json(file, {"died": sorted(died)})


@stage("judging a few samples alone and together")
def _check(backend: Backend, listed: Sequence[InputSample], n: int, tolerance: float | None) -> IdentityReport:
    asked: list[ScoreRequest] = [one.asked for one in listed if one.asked is not None]
    there = getattr(backend, "check", None)  # a model in another process is looked at there
    if there is not None:
        report: IdentityReport = there(asked, n, tolerance)
        return report
    return check_identity(backend, asked, n=n, tolerance=tolerance)


@stage("measuring the memory of batches")
def _fit(backend: Backend, listed: Sequence[InputSample]) -> int | None:
    """The largest safe budget, where the backend is one whose memory can be measured."""
    asked = [one.asked for one in listed[:: max(1, len(listed) // MOST_FITTED)] if one.asked is not None]
    return budget_of(backend, asked)


def _reused(backends: Sequence[Backend]) -> dict[str, float]:
    found: dict[str, float] = {}
    for backend in backends:
        for name, number in getattr(backend, "reused", dict)().items():
            found[f"reused_{name}"] = found.get(f"reused_{name}", 0) + number
    return found


def _slower(backends: Sequence[Backend]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for backend in backends for line in slower_ways(backend)))


def _is_column(value: Any, rows: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == rows


def _conversation(prompt: Any, completion: Any, columns: dict[str, Any]) -> dict[str, Any]:
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    images = {name: columns[name] for name in ("image", "images") if columns.get(name)}
    return {"messages": [*before, *after], **images}
