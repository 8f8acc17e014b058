"""The check of a run with `exactness: bits`, before its first update: the same atoms twice, in another order, bit for bit.

first and last atom of this rank -> gradients -> the other way round -> digests of every tensor, compared
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import LoadedStep
from truebatch.errors import LawError
from truebatch.training.checks.equality import Equality, undisturbed
from truebatch.training.checks.first_step import check_first_step, keep_equality
from truebatch.training.context import Job
from truebatch.training.distributed.collectives import all_gather_list
from truebatch.training.exactness.atoms import does_not_fit
from truebatch.training.exactness.digest import mixed_bits
from truebatch.training.exactness.gradient_sum import take_gradient
from truebatch.training.memory.oom import first_line, free_memory, is_out_of_memory
from truebatch.training.step import StepEngine, run_atom
from truebatch.training.train_state import TrainState


def check_first_atoms(job: Job, state: TrainState, loaded: LoadedStep, counts: Mapping[str, int]) -> None:
    """Once a process, before its first update: samples alone and as cut, if the run asks for that, then atoms twice."""
    if job.records or any(found is not None and found.verdict == "bits" for found in job.equality):
        return
    if job.config.check_samples:
        check_first_step(job, state, loaded)
    why = check_bits(job.engine, loaded.batches, counts, epoch=state.epoch)
    earlier = next((found for found in job.equality if found is not None), Equality(verdict="bits"))
    found = replace(earlier, verdict="bits", why=why)
    job.say(f"equality: {found}")
    keep_equality(job.run, found, job.engine)
    job.equality[:] = [found]


def check_bits(
    engine: StepEngine, atoms: Sequence[MicroBatch], counts: Mapping[str, int], *, epoch: int
) -> str:  # fmt: skip
    """What was compared, in words; `LawError` naming the tensor if some atom does not repeat itself. All ranks call it."""
    used = [atom for atom in atoms if atom.num_samples]
    chosen = used if len(used) < 2 else [used[0], used[-1]]
    with undisturbed(engine):
        first = [_digests_or_named(engine, atom, counts, epoch) for atom in chosen]
        free_memory(engine.device)
        again = [_digests_or_named(engine, atom, counts, epoch) for atom in reversed(chosen)]
    wrong = [name for a, b in zip(first, reversed(again), strict=True) for name in a if a[name] != b[name]]
    found = all_gather_list([(len(chosen), sum(atom.num_samples for atom in chosen), wrong[:1])])
    named = [name for _, _, names in found for name in names]
    if named:
        raise LawError(
            "an atom that is run twice does not give the same bits",
            seen=f"{named[0]} differs, before any update",
            do="look for an operation that adds in an order of its own; train with exactness: rounding without it",
        )
    number, samples = sum(one[0] for one in found), sum(one[1] for one in found)
    return f"{number} atom(s) with {samples} samples run twice, in another order"


def _digests_or_named(
    engine: StepEngine, atom: MicroBatch, counts: Mapping[str, int], epoch: int
) -> dict[str, int]:  # fmt: skip
    """Tried once more where memory runs out; an atom that does not fit even so is named."""
    for is_last in (False, True):
        try:
            return _digests(engine, atom, counts, epoch)
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error):
                raise
            said = first_line(error)  # only text leaves this block: the traceback holds the tensors of the try
        take_gradient(list(engine.model.parameters()))
        free_memory(engine.device, said=said)
        if is_last:
            raise does_not_fit(atom, said)
    raise AssertionError("unreachable")


def _digests(engine: StepEngine, atom: MicroBatch, counts: Mapping[str, int], epoch: int) -> dict[str, int]:
    """Of the loss terms and of every gradient of one atom."""
    sums = run_atom(engine, atom, counts, epoch=epoch)
    named = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
    gradients = take_gradient([p for _, p in named])
    found: dict[str, Tensor] = {f"the loss {name!r}": mixed_bits(value) for name, value in sums.items()}
    for (name, _), grad in zip(named, gradients, strict=True):
        if grad is not None:
            found[f"the gradient of {name!r}"] = mixed_bits(grad)
    numbers = torch.stack(list(found.values())).tolist()
    return dict(zip(found, numbers, strict=True))
