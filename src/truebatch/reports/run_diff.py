"""Two runs, line by line: the first step at which they differ, and the tensors of which it is known.

metrics.jsonl of both -> figures that no cut may change -> the first step that differs -> digests of that step by tensor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truebatch.config.yaml_files import read_yaml
from truebatch.errors import RunError
from truebatch.reports.sections.run import RunLog, read_log
from truebatch.training.exactness.digest import read_digests
from truebatch.training.run_dir.run_dir import CONFIG, METRICS, config_changes

DIGEST = "digest"
_COMPARED = ("loss", "grad_norm", "learning_rate", "validation", "updated", "tokens", "passed_over", DIGEST)
"""How the names of compared figures begin: what says how fast or how full a step was differs between right runs."""
_NOT_COMPARED = ("tokens_per_second",)


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first step at which some figures of two runs differ: name -> both values."""

    step: int
    figures: Mapping[str, tuple[Any, Any]]
    tensors: Sequence[str] = ()
    """Parameters and buffers whose digests differ, where both runs kept those of this step."""
    num_tensors: int = 0


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What was compared of two runs, and what differs."""

    names: tuple[str, str]
    steps: tuple[int, int]
    """Steps that each run has logged."""
    num_compared: int
    num_digests: int
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    first: StepDifference | None = None
    """The first step with any difference."""
    first_digest: StepDifference | None = None
    """The first step whose parameters differ."""
    last_equal_digest: int | None = None

    @property
    def is_equal(self) -> bool:
        """True where no compared figure differs; two runs with no step in common are never equal."""
        return self.first is None and self.num_compared > 0

    def lines(self) -> Iterator[str]:
        """What a person reads."""
        one, other = self.names
        yield f"{one}: {self.steps[0]:,} steps; {other}: {self.steps[1]:,} steps; {self.num_compared:,} in both"
        for name, (before, after) in self.settings.items():
            yield f"setting {name}: {before} / {after}"
        if not self.num_compared:
            yield "nothing was compared: no step is in both logs"
            return
        if self.first is None:
            yield f"equal to the last bit in {self.num_compared:,} steps: losses, gradient norms, learning rates"
        else:
            yield f"the first difference is at step {self.first.step:,}"
            for name, (before, after) in self.first.figures.items():
                yield f"  {name}: {_shown(before)} / {_shown(after)}{_apart(before, after)}"
        yield from self._digest_lines()

    def _digest_lines(self) -> Iterator[str]:
        until = "" if self.last_equal_digest is None else f"; equal until step {self.last_equal_digest:,}"
        if not self.num_digests:
            yield "parameters were not compared: no step has a digest in both runs (train.digest_every)"
        elif self.first_digest is None:
            yield f"parameters: equal in all {self.num_digests:,} step(s) of which both runs kept digests"
        else:
            yield f"parameters: the first digest that differs is of step {self.first_digest.step:,}{until}"
            tensors = self.first_digest.tensors
            if tensors:
                shown = ", ".join(tensors[:5]) + (", ..." if len(tensors) > 5 else "")
                yield f"  {len(tensors):,} of {self.first_digest.num_tensors:,} tensors differ: {shown}"


def diff_runs(one: Path, other: Path) -> RunDiff:
    """Compare the logs and digests of two runs; both may still be going on.

    Figures are compared bit for bit: runs that are equal up to rounding differ in their first steps.
    """
    logs = (_log(one), _log(other))
    steps = tuple({step for step, _ in _keyed(log)} for log in logs)
    left, right = (dict(_keyed(log)) for log in logs)
    first = first_digest = last_equal = None
    num_digests = 0
    both = sorted(left.keys() & right.keys())
    for step in both:
        differing = _differing(left[step], right[step])
        digests = [record.get(DIGEST) for record in (left[step], right[step])]
        if None not in digests:
            num_digests += 1
            if digests[0] == digests[1] and first_digest is None:
                last_equal = step
            elif digests[0] != digests[1] and first_digest is None:
                first_digest = _difference(step, differing, one, other)
        if differing and first is None:
            first = _difference(step, differing, one, other)
    return RunDiff(
        names=(str(one), str(other)), steps=(len(steps[0]), len(steps[1])), num_compared=len(both),
        num_digests=num_digests, settings=_settings(one, other), first=first, first_digest=first_digest,
        last_equal_digest=last_equal,
    )  # fmt: skip


def _log(run: Path) -> RunLog:
    if not (run / METRICS).is_file():
        raise RunError(
            f"{run} has no log to compare",
            seen=f"no {METRICS} in it",
            do="give the folder that `truebatch train` has named",
        )
    return read_log(run)


def _keyed(log: RunLog) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step -> all that was logged of it: its own record, and that of its validation."""
    joined: dict[int, dict[str, Any]] = {}
    for record in log.records:
        if isinstance(record.get("step"), int):
            joined.setdefault(record["step"], {}).update(record)
    yield from joined.items()


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Figures of one step that differ. A digest that one run did not keep is no difference."""
    names = [name for name in {**left, **right} if name.startswith(_COMPARED) and name not in _NOT_COMPARED]
    pairs = {name: (left.get(name), right.get(name)) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b and not (name == DIGEST and None in (a, b))}


def _difference(step: int, figures: Mapping[str, tuple[Any, Any]], one: Path, other: Path) -> StepDifference:
    digests = [read_digests(run, step) for run in (one, other)]
    if not all(digests):
        return StepDifference(step, figures)
    left, right = digests
    differing = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    return StepDifference(step, figures, differing, len({**left, **right}))


def _settings(one: Path, other: Path) -> dict[str, tuple[Any, Any]]:
    if not all((run / CONFIG).is_file() for run in (one, other)):
        return {}
    return config_changes(*(read_yaml(run / CONFIG).values for run in (one, other)))


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _apart(one: Any, other: Any) -> str:
    if not (isinstance(one, float) and isinstance(other, float)):
        return ""
    return f" ({abs(one - other) / max(abs(one), abs(other), 1e-30):.0e} apart)"
