"""The subject of a verification: a model with its objective, or any callable from a micro-batch to per-sample
outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.batch.keyed_random import noise_for
from truebatch.batch.microbatch import CELLS, MicroBatch
from truebatch.errors import DataError
from truebatch.objective import CoupledObjective, Objective, add_counts, forward_context
from truebatch.training.checks.comparable import EmbeddingsAlone
from truebatch.verification.arrangements import ArrangedBatch
from truebatch.verification.outputs import PerSample, Readings, split_output

Sample = Mapping[str, Any]
LARGE = 1.0e4
IGNORED = -100


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """What one micro-batch gave."""

    outputs: PerSample
    sums: dict[str, Tensor]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A way to run any micro-batch of these samples."""

    samples: Sequence[Sample]
    fields: Sequence[Field]
    call: Callable[[Any, MicroBatch], ForwardResult]
    """(model, micro-batch) -> outcome."""
    model: nn.Module | None
    """For gradients and module names; None for a bare callable."""
    causal: bool
    """True if a token must not be moved by later ones."""
    plain_values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Field -> whole numbers that may stand anywhere (no placeholders); by default those the samples have."""
    hold: Callable[[Any, MicroBatch], AbstractContextManager[None]] | None = None
    """What must stay open until backward is over, as the objective says: layers may be run again there."""
    count: Callable[[MicroBatch], dict[str, int]] | None = None
    """What a micro-batch adds to what the step is divided by; None if only its results tell."""

    objective: Objective | None = None
    """The loss, where it is one that training takes: bits are compared of its gradient."""
    readings: Readings | None = None
    """How outputs are taken apart; it learns from samples alone."""

    @contextmanager
    def learning(self) -> Iterator[None]:
        """While open, what is run shows how each output is to be taken apart."""
        readings = self.readings or Readings()
        readings.is_learning = True
        try:
            yield
        finally:
            readings.is_learning = False

    @property
    def planned(self) -> Field:
        """The field whose cells are planned: along the planned axis, or the first ragged one, or any if none is ragged."""
        along = next((f for f in self.fields if f.axis == CELLS and f.kind in ("along", "nested")), None)
        return along or next((f for f in self.fields if f.kind != "once"), self.fields[0])

    @property
    def is_ragged(self) -> bool:
        """False if every field has one value a sample: then there is no padding."""
        return any(f.kind != "once" for f in self.fields)

    @property
    def lengths(self) -> list[int]:
        """Cells of every sample along the planned axis (or the first ragged one); 1 if nothing is ragged."""
        for at, sample in enumerate(self.samples):
            _check_keys(sample, self.fields, at)
        planned = self.planned
        return [1 if planned.kind == "once" else len(sample[planned.key]) for sample in self.samples]

    @property
    def device(self) -> torch.device:
        """Where the model is; micro-batches are moved there."""
        tensors = () if self.model is None else chain(self.model.parameters(), self.model.buffers())
        found = next(iter(tensors), None)
        return torch.device("cpu") if found is None else found.device

    def micro_batch(self, piece: ArrangedBatch, samples: Sequence[Sample] | None = None) -> MicroBatch:
        """The tensors of one piece; its empty cells filled as the piece says."""
        source = self.samples if samples is None else samples
        batch = collate([source[int(i)] for i in piece.rows.ids], piece.rows, self.fields, side=piece.side)
        if piece.filling != "declared":
            _fill(batch, self, piece.filling)
        return batch.to(self.device)

    def run(self, piece: ArrangedBatch, samples: Sequence[Sample] | None = None) -> ForwardResult:
        """Collate and run one piece."""
        return self.call(self.model, self.micro_batch(piece, samples))

    def held(self, piece: ArrangedBatch) -> AbstractContextManager[None]:
        """Open around forward and backward of an arrangement that begins with this piece."""
        return nullcontext() if self.hold is None else self.hold(self.model, self.micro_batch(piece))

    def counts(self, pieces: Sequence[ArrangedBatch]) -> dict[str, int] | None:
        """What the step of these micro-batches is divided by, before any of them is run."""
        return None if self.count is None else add_counts(self.count(self.micro_batch(piece)) for piece in pieces)


def model_subject(
    model: nn.Module, objective: Objective, samples: Sequence[Sample], fields: Sequence[Field], causal: bool | None
) -> Subject:
    """A model and its objective.

    Outputs are the objective's own `outputs_and_sums` or `outputs`, else what the model's forward returned; of a loss that
    couples its samples their embeddings, which are all that a cut could change.
    """
    given = objective
    if isinstance(objective, CoupledObjective):
        objective = EmbeddingsAlone(objective)
    both = getattr(objective, "outputs_and_sums", None)
    own = getattr(objective, "outputs", None)
    readings = Readings()

    def call(model: nn.Module, batch: MicroBatch) -> ForwardResult:
        with noise_for(batch, seed=0):  # Noise keyed by sample is part of the model, and may stay on.
            outputs, sums = outputs_and_sums(model, batch)
        return ForwardResult(outputs, sums, objective.counts(batch))

    def outputs_and_sums(model: nn.Module, batch: MicroBatch) -> tuple[PerSample, dict[str, Tensor]]:
        if both is not None:
            found: tuple[PerSample, dict[str, Tensor]] = both(model, batch)
            return found
        if own is not None:
            return own(model, batch), objective.sums(model, batch)
        with _returned(model) as values:
            sums = objective.sums(model, batch)
        return (split_output(values[0], batch, readings) if len(values) == 1 else {}), sums

    @contextmanager
    def hold(model: nn.Module, batch: MicroBatch) -> Iterator[None]:
        with noise_for(batch, seed=0), forward_context(objective, model, batch):  # for layers that are run again
            yield

    is_causal = _is_causal(fields, causal)
    return Subject(
        samples, fields, call, model, is_causal, hold=hold, count=objective.counts, objective=given, readings=readings
    )


def callable_subject(
    function: Callable[[MicroBatch], Any],
    samples: Sequence[Sample],
    fields: Sequence[Field],
    causal: bool | None,
    model: nn.Module | None = None,
) -> Subject:
    """Any callable from a micro-batch to per-sample outputs, or to a mapping with a loss too (see `read_result`)."""

    readings = Readings()

    def call(_model: nn.Module | None, batch: MicroBatch) -> ForwardResult:
        return read_result(function(batch), lambda rest: split_output(rest, batch, readings), batch.num_samples)

    found = model if model is not None else find_module(function)
    return Subject(samples, fields, call, found, _is_causal(fields, causal), readings=readings)


def read_result(
    value: Any,
    split: Callable[[Any], PerSample],
    num_samples: int,
    *,
    stand_in: bool = True,
    number_is_loss: bool = True,
) -> ForwardResult:
    """Outputs and loss of a user's function; a single number is a loss unless `number_is_loss` is False.

    `loss_sum` with `count` is a sum and what it is divided by. A plain `loss` is an average over the samples. Without
    either, the sum of the squared outputs stands in for a loss, so that gradients can be compared all the same.
    """
    parts = dict(value) if isinstance(value, Mapping) else {}
    if "loss_sum" in parts and "count" in parts:
        total, count = parts.pop("loss_sum"), parts.pop("count")
        return ForwardResult(split(parts), {"loss": torch.as_tensor(total)}, {"loss": int(count)})
    loss = parts.pop("loss", None)
    if loss is not None:
        return ForwardResult(split(parts), {"loss": torch.as_tensor(loss) * num_samples}, {"loss": num_samples})
    if number_is_loss and isinstance(value, Tensor) and value.ndim == 0:
        return ForwardResult({}, {"loss": value * num_samples}, {"loss": num_samples})
    outputs = split(value)
    sums = _squares(outputs) if stand_in else {}
    return ForwardResult(outputs, sums, dict.fromkeys(sums, num_samples))


def _check_keys(sample: Any, fields: Sequence[Field], at: int) -> None:
    missing = [f.key for f in fields if not isinstance(sample, Mapping) or f.key not in sample]
    if missing:
        found = f"fields {sorted(sample)}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise DataError(
            f"sample {at} has no {missing[0]!r}",
            seen=f"{found}, declared {[f.key for f in fields]}",
            do="give samples as dictionaries with an entry for every declared field",
        )


def find_module(function: Any) -> nn.Module | None:
    """The model a function works with: itself, the object it is a method of, or the modules it reaches by name."""
    modules = list(_reached_modules(function, depth=3).values())
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules) if modules else None


def _reached_modules(value: Any, depth: int) -> dict[int, nn.Module]:
    if isinstance(value, nn.Module):
        return {id(value): value}
    if depth == 0 or not (callable(value) or hasattr(value, "__dict__")):
        return {}
    owner, code = getattr(value, "__self__", None), getattr(value, "__code__", None)
    held = [owner] if isinstance(owner, nn.Module) else list(getattr(owner, "__dict__", {}).values())
    held += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell is not None]
    held += [value.__globals__[n] for n in code.co_names if n in value.__globals__] if code is not None else []
    found: dict[int, nn.Module] = {}
    for inner in held:
        if isinstance(inner, nn.Module) or inspect.isfunction(inner) or inspect.ismethod(inner):
            found |= _reached_modules(inner, depth - 1)
    return found


def _is_causal(fields: Sequence[Field], causal: bool | None) -> bool:
    """A field shifted from an input is the next token: a model that sees later cells sees the answer."""
    if causal is not None:
        return causal
    names = {f.key for f in fields if not f.shift}
    return any(f.shift and f.key in names for f in fields)


def _squares(outputs: PerSample) -> dict[str, Tensor]:
    parts = {k: [t.float() for t in v if t.is_floating_point()] for k, v in outputs.items()}
    return {k: torch.stack([t.square().sum() for t in v]).sum() for k, v in parts.items() if v}


@contextmanager
def _returned(model: nn.Module) -> Iterator[list[Any]]:
    """What the model's forward returns while the context lasts."""
    values: list[Any] = []
    handle = model.register_forward_hook(lambda _module, _args, value: values.append(value))
    try:
        yield values
    finally:
        handle.remove()


def _fill(batch: MicroBatch, subject: Subject, filling: str) -> None:
    for f in subject.fields:
        if f.kind not in ("along", "nested") or is_marker(f, subject.samples):
            continue
        values = batch[f.name]
        is_empty = ~batch.rows(f.inner or f.axis).is_real
        if is_empty.any():
            values[is_empty] = _foreign(values, is_empty, filling, subject.plain_values.get(f.name, ()))


def _foreign(values: Tensor, is_empty: Tensor, filling: str, plain: Sequence[int]) -> Tensor:
    """Whole numbers stay among those the data has (an id must exist); other numbers may be anything."""
    wanted = values[is_empty]
    if values.is_floating_point():
        return torch.full_like(wanted, float("nan") if filling == "nan" else LARGE if filling == "large" else 3.7)
    known = values.new_tensor(plain) if len(plain) else values[~is_empty].flatten()
    at = torch.from_numpy(np.random.default_rng(1).integers(0, len(known), wanted.numel()))
    largest = torch.full_like(wanted, int(known.max()))
    return largest if filling == "large" else known[at].view(wanted.shape)


def as_array(value: Any) -> NDArray[Any]:
    """A value of a sample as an array, whatever it came as."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return np.asarray(value)


def is_marker(field: Field, samples: Sequence[Sample]) -> bool:
    """True if the pad value itself tells which cells are empty: ignored labels, masks of ones, ids looked for."""
    if field.marks_empty or field.pad == IGNORED:
        return True
    values = [as_array(v) for s in samples for v in (s[field.key] if field.kind == "nested" else [s[field.key]])]
    kinds = {v.dtype.kind for v in values}
    return bool(kinds <= set("biu")) and all(bool((v == 1).all()) for v in values)
