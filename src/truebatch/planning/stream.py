"""Plan streams of unknown length window by window, with a bounded buffer.

source -> buffer of `window` samples -> a plan of the buffer -> its full steps; the rest stays in the buffer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from truebatch.errors import DataError, PlanError
from truebatch.planning.assign_ranks import deal_units
from truebatch.planning.config import PlanConfig, check_whole
from truebatch.planning.cut_steps import cut_steps, form_steps, keyed_sample_order
from truebatch.planning.pack_epoch import form_units
from truebatch.planning.plan import Plan
from truebatch.planning.rows import Ints, Rows
from truebatch.planning.sample_table import LARGEST_COST, LONGEST, longest_allowed, measure_samples

STATE_VERSION = 1


class StreamSample(NamedTuple):
    """Length and costs of one sample of a source; a plain number is a length without costs."""

    length: int
    costs: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """Counts of the samples read so far."""

    read: int
    run: int
    dropped: int
    cut: int


class StreamPlanner:
    """Steps of a stream. Within a window the guarantees of a plan hold; every sample is used once.

    The state can be saved between any two steps and holds no more than the buffer. To resume, load it and give a source
    that begins at sample number `state["read"]`; the number of ranks may differ, the samples of each step do not.

    >>> from truebatch import PlanConfig
    >>> from truebatch.planning.stream import StreamPlanner
    >>> planner = StreamPlanner(PlanConfig(cells=64, samples_per_step=4), window=8)
    >>> len(list(planner.steps(iter([3, 9, 4, 7, 5, 2, 8, 1, 6, 3]))))
    3
    """

    def __init__(self, config: PlanConfig, *, window: int, ranks: int = 1, epoch: int = 0) -> None:
        for name, value, least in (("window", window, 1), ("ranks", ranks, 1), ("epoch", epoch, 0)):
            check_whole(name, value, least=least)
        if config.samples_per_step is not None and config.samples_per_step > window:
            raise PlanError(
                "a step does not fit into the window",
                seen=f"samples_per_step={config.samples_per_step:,}, window={window:,}",
                do=f"give window={config.samples_per_step:,} or more",
            )
        self.config, self.window, self.ranks, self.epoch = config, window, ranks, epoch
        self._ids: list[int] = []
        self._lengths: list[int] = []
        self._costs: dict[str, list[int]] = {name: [] for name in config.costs}
        self._read = self._windows = self._taken = self._run = self._dropped = self._cut = 0
        self._is_planned = self._is_last = False

    @property
    def counts(self) -> StreamCounts:
        """Samples read, used, dropped and cut so far; samples are dropped or cut only on request."""
        return StreamCounts(self._read, self._run, self._dropped, self._cut)

    def steps(self, source: Iterable[int | StreamSample]) -> Iterator[list[list[Rows]]]:
        """The micro-batches of each rank, step by step, until the source and the buffer are empty.

        With `overlong="cut"` a sample longer than `longest` is planned with that length.
        """
        samples = iter(source)
        while not (self._is_last and not self._is_planned):
            if not self._is_planned:
                self._is_last = not self._fill(samples)
                self._is_planned = bool(self._ids)
            if self._is_planned:
                yield from self._take_window()

    @property
    def longest(self) -> int:
        """The length above which a sample exceeds a limit by itself."""
        return longest_allowed(self.config)

    def state_dict(self) -> dict[str, Any]:
        """Plain data no larger than the buffer, from which `load_state_dict` resumes at the next step."""
        return {
            "version": STATE_VERSION, "config": self.config.to_dict(), "window": self.window, "epoch": self.epoch,
            "read": self._read, "windows": self._windows, "taken": self._taken, "run": self._run,
            "dropped": self._dropped, "cut": self._cut, "is_planned": self._is_planned, "is_last": self._is_last,
            "ids": list(self._ids),
            "lengths": list(self._lengths), "costs": {name: list(c) for name, c in self._costs.items()},
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; rejects a state saved with other settings."""
        mine = self.state_dict()
        missing = [name for name in mine if name not in state]
        if missing or state["version"] != STATE_VERSION:
            raise DataError(
                "this is not the state of a stream", seen=f"missing {missing or 'nothing, other version'}",
                do="give what state_dict() of the same version returned",
            )  # fmt: skip
        for name in ("config", "window", "epoch"):
            if state[name] != mine[name]:
                raise DataError(
                    f"the state was saved with another {name}", seen=f"{state[name]!r}, now {mine[name]!r}",
                    do="resume with the settings the stream was started with",
                )  # fmt: skip
        for name in ("read", "windows", "taken", "run", "dropped", "cut", "is_planned", "is_last"):
            setattr(self, f"_{name}", state[name])
        self._ids, self._lengths = list(state["ids"]), list(state["lengths"])
        self._costs = {name: list(column) for name, column in state["costs"].items()}

    def _fill(self, samples: Iterator[int | StreamSample]) -> bool:
        """Read until the buffer is full; False when the source ended."""
        while len(self._ids) < self.window:
            try:
                sample = next(samples)
            except StopIteration:
                return False
            self._add(sample if isinstance(sample, StreamSample) else StreamSample(sample, {}))
        return True

    def _add(self, sample: StreamSample) -> None:
        number, limits = self._read, self.config.costs
        _check_sample(sample, number, set(limits))
        is_costly = any(sample.costs[name] > limit for name, limit in limits.items())
        is_over = is_costly or sample.length > self.longest
        if is_over and (self.config.overlong == "refuse" or (is_costly and self.config.overlong == "cut")):
            raise PlanError(
                "a sample of the stream exceeds a limit by itself",
                seen=f"sample {number}: length {sample.length:,} of {self.longest:,}, {dict(sample.costs)} of {dict(limits)}",
                do="raise the limit, or set overlong='drop'" + ("" if is_costly else " or overlong='cut'"),
            )
        self._read += 1
        if is_over and self.config.overlong == "drop":
            self._dropped += 1
            return
        self._cut += is_over
        self._ids.append(number)
        self._lengths.append(min(sample.length, self.longest))
        for name, column in self._costs.items():
            column.append(sample.costs[name])

    def _take_window(self) -> Iterator[list[list[Rows]]]:
        """The steps of the buffer that were not taken yet; afterwards only what does not fill a step stays in it."""
        plan = self._plan_window()
        num = plan.num_steps if self._is_last else self._num_full(plan)
        ids = np.array(self._ids, dtype=np.int64)
        while self._taken < num:
            step = self._taken
            self._taken += 1
            self._run += len(plan.step_sample_ids(step))
            yield [[_renamed(rows, ids) for rows in micro] for micro in plan.step(step)]
        left = [plan.step_sample_ids(s) for s in range(num, plan.num_steps)]
        self._keep(sorted(int(i) for part in left for i in part))

    def _plan_window(self) -> Plan:
        config, key = self.config, self.epoch + (self._windows << 32)
        samples = measure_samples(self._lengths, config, costs=self._costs, counts={})
        ids = np.arange(len(self._ids), dtype=np.int64)
        if config.is_epoch_wide:
            units = form_units(samples, ids, config, key, fullest_first=True)
            cut = deal_units(samples, units, config, ranks=self.ranks)
        else:
            ids = keyed_sample_order(ids, config, key)
            cut = cut_steps(samples, ids, form_steps(samples, ids, config), config, ranks=self.ranks)
        return Plan(samples=samples, cut=cut, config=config, epoch=key, ranks=self.ranks)

    def _num_full(self, plan: Plan) -> int:
        """Number of steps to take from a window that is not the last: all but one that later samples could still
        fill."""
        size, last = self.config.samples_per_step, plan.num_steps - 1
        if size is not None:
            return plan.num_steps if len(plan.step_sample_ids(last)) == size else last
        if last > 0:
            return last
        wanted = self.config.rows_per_step or self.config.micro_batches_per_step
        if wanted is not None and _num_units(plan, is_rows=self.config.rows_per_step is not None) == wanted:
            return 1
        raise PlanError(
            "the window is too small to fill a step",
            seen=f"window={self.window:,} samples, {self.config.step_size}",
            do="give a larger window or smaller steps",
        )

    def _keep(self, places: list[int]) -> None:
        self._ids = [self._ids[i] for i in places]
        self._lengths = [self._lengths[i] for i in places]
        self._costs = {name: [column[i] for i in places] for name, column in self._costs.items()}
        self._windows += 1
        self._taken = 0
        self._is_planned = False


def _num_units(plan: Plan, *, is_rows: bool) -> int:
    micro = [rows for rank in plan.step(0) for rows in rank if rows.num_samples]
    return sum(rows.num_rows for rows in micro) if is_rows else len(micro)


def _renamed(rows: Rows, ids: Ints) -> Rows:
    """The same rows with the samples' numbers in the stream."""
    return Rows(ids[rows.ids], rows.starts, rows.width, rows.layout)


def _check_sample(sample: StreamSample, number: int, names: set[str]) -> None:
    values = {"length": (sample.length, 1, LONGEST)} | {n: (v, 0, LARGEST_COST) for n, v in sample.costs.items()}
    for name, (value, least, most) in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
            raise PlanError(
                f"the {name} of a sample must be an integer from {least} to {most:,}",
                seen=f"sample {number} has {name} {value!r}",
                do="fix the function that measures the stream, or drop such samples",
            )
    if set(sample.costs) != names:
        raise PlanError(
            "the costs of a sample and the limits on costs have different names",
            seen=f"sample {number} has {sorted(sample.costs)}, limits={sorted(names)}",
            do="give StreamSample(length, costs) with one cost for each limit",
        )
