"""A stream as the data of a run: read a window at a time, every window planned like an epoch, resumable between steps.

source -> a window of samples in memory -> its lengths -> a plan of whole steps -> the next window, or another pass
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, TypeGuard

from torch.utils.data import IterableDataset

from truebatch.batch.fields import Field
from truebatch.errors import ConfigError, DataError, RunError
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.plan import Plan, build_plan
from truebatch.training.callbacks import CallbackAction
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, content_of, first_samples, measure_by_reading
from truebatch.training.distributed.collectives import all_gather_list, num_ranks


def is_stream(samples: object) -> TypeGuard[Iterable[Any]]:
    """True for what can only be read from its beginning: a torch or `datasets` IterableDataset, or any iterable without
    a length or an index."""
    if isinstance(samples, IterableDataset):
        return True
    return hasattr(samples, "__iter__") and not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__"))


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a window begins; plain data for a checkpoint."""

    window: int = 0
    first_id: int = 0
    """Samples read before it, over all passes: the id of its first sample."""
    passes: int = 0
    """Times the source was read to its end before."""
    offset: int = 0
    """Samples of this pass before it."""
    source: Mapping[str, Any] | None = None
    """What the source's own `state_dict()` gave there; None where it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamWindow:
    """Consecutive samples of a stream, addressed by their number in the whole of it."""

    start: StreamPosition
    samples: Sequence[Any]
    measured: Measured
    digest: str
    """Of lengths and, where it can be compared, content."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample_id: int, /) -> Any:
        at = sample_id - self.start.first_id
        if not 0 <= at < len(self.samples):
            raise IndexError(sample_id)
        return self.samples[at]


class SampleStream:
    """The windows of a source; also a dataset of the samples of the window at hand, and a callback with its position.

    Every rank reads the whole source, so that a step is the same set of samples on any number of ranks; a source that
    gives the ranks different samples is refused. To resume, the window at hand is read again: from the source's own
    state if it has one, else, or where that does not lead to the same samples, from the beginning of the pass.
    """

    name = "stream"

    def __init__(
        self, source: Iterable[Any], fields: Sequence[Field], *, window: int, limit: int | None = None
    ) -> None:
        if iter(source) is source:
            raise ConfigError(
                "this stream can be read only once, so a run could not resume",
                seen=f"a {type(source).__name__}",
                do="give an IterableDataset, or an object whose __iter__ begins anew",
            )
        self._source, self._fields, self._window, self._limit = source, tuple(fields), window, limit
        self._position = StreamPosition()  # of what comes next
        self._iterator: Iterator[Any] | None = None
        self._now: StreamWindow | None = None
        self._to_restore: tuple[StreamPosition, str] | None = None

    def __getitem__(self, sample_id: int, /) -> Any:
        return self.at_hand[sample_id]

    @property
    def at_hand(self) -> StreamWindow:
        """The window read last; the first one if none was."""
        if self._to_restore is not None:
            self._now = self._read_again(*self._to_restore)
            self._to_restore = None
        if self._now is None:
            self._now = self._read()
        return self._now

    def window(self, number: int) -> StreamWindow:
        """This window; only the one at hand and those after it can be asked for."""
        while self.at_hand.start.window < number:
            self._now = self._read()
        return self.at_hand

    def before_step(self, step: int) -> None:
        """Nothing to do."""

    def after_step(self, step: int) -> CallbackAction:
        """Asks for nothing."""
        return CallbackAction()

    def ended(self, step: int) -> None:
        """Nothing to do."""

    def state(self) -> Mapping[str, Any]:
        """Where the window at hand begins, and what it holds."""
        window = self.at_hand
        return {"start": asdict(window.start), "digest": window.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The window of a saved state is read when it is first asked for."""
        self._to_restore = (StreamPosition(**state["start"]), str(state["digest"])) if state else None
        if not state:
            self._go_to(StreamPosition())
            self._now = None

    def _read_again(self, start: StreamPosition, digest: str) -> StreamWindow:
        for position in (start, replace(start, source=None)):
            if position == start or start.source is not None:
                self._go_to(position)
                window = self._read()
                if window.digest == digest:
                    return replace(window, start=start)
        raise RunError(
            "the stream no longer gives the samples that this run was at",
            seen=f"window {start.window}, from sample {start.offset:,} of pass {start.passes}, has other lengths or content",
            do="bring the data back, or use a stream that gives the same samples in the same order every time it is read",
        )

    def _go_to(self, position: StreamPosition) -> None:
        self._iterator, self._position = None, position

    def _read(self) -> StreamWindow:
        start = self._position if self._iterator is None else replace(self._position, source=self._source_state())
        samples = list(islice(self._open(), self._left(self._window)))
        if not samples:
            if start.offset == 0:
                raise DataError("the stream gives no samples", seen="it ended at once", do="check what it reads")
            self._go_to(replace(start, passes=start.passes + 1, offset=0, source=None))
            return self._read()
        self._position = replace(
            start, window=start.window + 1, first_id=start.first_id + len(samples), offset=start.offset + len(samples),
            source=None,
        )  # fmt: skip
        return self._checked(start, samples)

    def _left(self, window: int) -> int:
        """A quick try reads only the first samples of every pass."""
        return window if self._limit is None else min(window, self._limit - self._position.offset)

    def _open(self) -> Iterator[Any]:
        """The source from the position on."""
        if self._iterator is None:
            source: Any = self._source
            if hasattr(source, "set_epoch"):
                source.set_epoch(self._position.passes)
            skipped = self._position.offset
            if self._position.source is not None:
                source.load_state_dict(dict(self._position.source))
                skipped = 0
            elif self._keeps_state():
                source.load_state_dict(self._first_state)
            self._iterator = iter(source)
            for _ in islice(self._iterator, skipped):
                pass
        return self._iterator

    def _keeps_state(self) -> bool:
        """A source with a state of its own resumes from it; the one it has before the first reading begins a pass."""
        source: Any = self._source
        if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
            return False
        if not hasattr(self, "_first_state"):
            self._first_state = source.state_dict()
        return True

    def _source_state(self) -> Mapping[str, Any] | None:
        source: Any = self._source
        return source.state_dict() if self._keeps_state() else None

    def _checked(self, start: StreamPosition, samples: Sequence[Any]) -> StreamWindow:
        """Measured, and the same on every rank."""
        measured = measure_by_reading(samples, self._fields, what="window of the stream")
        digest = hashlib.blake2b(measured.lengths.tobytes(), digest_size=16)
        digest.update(content_of(TrainData(samples=samples, fields=self._fields)).encode())
        window = StreamWindow(start, samples, measured, digest.hexdigest())
        if num_ranks() > 1 and len(set(all_gather_list([window.digest]))) > 1:
            raise DataError(
                "the stream gives every process other samples, but a step is one set of samples",
                seen=f"window {start.window} differs between {num_ranks()} processes",
                do="give the whole stream to every process: no split_dataset_by_node, no shuffling without a seed",
            )
        return window


@dataclass(slots=True, eq=False)
class WindowPlans:
    """The plan of each window of a stream, in the place of the plans of epochs."""

    stream: SampleStream
    config: PlanConfig
    _last: Plan | None = None

    @property
    def measured(self) -> Measured:
        """Lengths of the window at hand."""
        return self.stream.at_hand.measured

    def of(self, epoch: int) -> Plan:
        """The plan of a window, the same on every rank; its ids count from the window's first sample."""
        window = self.stream.window(epoch)
        if self._last is None or self._last.epoch != epoch:
            self._last = build_plan(window.measured.lengths, self.config, epoch=epoch, ranks=num_ranks())
        return self._last


def open_data(data: TrainData, config: TrainConfig) -> tuple[TrainData, SampleStream | None]:
    """The data of a run with at most `limit` samples, and its stream if it is one."""
    if not is_stream(data.samples):
        return first_samples(data, config.limit), None
    if config.max_steps is None:
        raise ConfigError(
            "a stream has no length, so its steps cannot be counted",
            seen=f"a {type(data.samples).__name__}, max_steps={config.max_steps}",
            do="set max_steps; a stream that ends before is read again",
        )
    if config.compile:
        raise ConfigError(
            "compiled layers need the lengths of all samples, which a stream does not tell",
            seen=f"a {type(data.samples).__name__}, compile={config.compile}",
            do="leave compile out, or give a dataset with a length",
        )
    size = config.num_samples_per_step()
    window = -(-config.window // size) * size
    stream = SampleStream(data.samples, data.fields, window=window, limit=config.limit)
    return replace(data, samples=stream, measured=None), stream
