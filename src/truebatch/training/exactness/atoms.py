"""The gradient of a step from whole atoms: each is one forward and one backward of its own, and a fixed tree adds them up.

atoms of this rank -> a few on the device at a time -> gradient of each -> tree -> parts of all ranks -> `.grad`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import cells_of
from truebatch.errors import ConfigError, MemoryLimitError
from truebatch.training.distributed.collectives import rank, sum_numbers
from truebatch.training.exactness.gradient_sum import (
    GradientSum,
    add_gradients,
    give_gradient,
    sum_in_order,
    take_gradient,
)
from truebatch.training.exactness.tree import TreeSum
from truebatch.training.memory.oom import first_line, free_memory, is_out_of_memory
from truebatch.training.random_state import random_state, restore_random

ORDER = "TRUEBATCH_ATOM_ORDER"
"""`shuffled:SEED` runs the atoms of every step in a random order, to show that nothing depends on it."""
TRIES = 4
"""Of a step that runs out of memory: as it is, with one atom on the device, with waiting sums on the host, and once more."""
ONE_ATOM, ON_HOST = 1, 2
"""How little is on the device after memory has run out: one atom at a time; and sums that wait are on the host."""
PATIENCE = 32
"""Steps without trouble after which what was moved off the device comes back."""

Run = Callable[[MicroBatch], Mapping[str, Tensor]]
"""Forward and backward of one atom: the sums of its loss terms; its gradient is in `.grad`."""


@dataclass(kw_only=True, slots=True, eq=False)
class AtomBudget:
    """How atoms are run on this rank; nothing here changes a bit of the result."""

    resident: int = 1
    """Atoms whose inputs are on the device at a time."""
    leanness: int = 0
    """0 until memory has run out, then `ONE_ATOM`, then `ON_HOST`."""
    clean_steps: int = 0
    recoveries: int = 0
    """How often a step was run again."""
    order_seed: int | None = None
    """Run the atoms of every step in a random order, to show that nothing depends on it."""
    say: Callable[[str], None] = lambda _line: None

    def note_step(self, *, is_clean: bool) -> None:
        """A step is done."""
        self.clean_steps = self.clean_steps + 1 if is_clean else 0
        if self.clean_steps >= PATIENCE:
            self.leanness = 0


def sum_atoms(
    budget: AtomBudget,
    atoms: Sequence[MicroBatch],
    parameters: Sequence[nn.Parameter],
    run: Run,
    *,
    terms: Sequence[str],
    device: torch.device,
) -> dict[str, Tensor]:
    """The gradient of the whole step, over all ranks, in `.grad`, and the sums of its terms.

    `atoms` are this rank's, neighbours in the order of the step, in as many places as every other rank has; empty ones
    come last.
    """
    used = [atom for atom in atoms if atom.num_samples]
    num_leaves = sum_numbers([len(used)], device)[0]
    first = rank() * len(atoms)
    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    like = [*trained, torch.zeros(len(terms), dtype=torch.float64, device=device)]
    if not num_leaves:
        return {name: like[-1][i] for i, name in enumerate(terms)}
    parts = sum_parts(budget, used, trained, run, first=first, num_leaves=num_leaves, terms=terms, device=device)
    *gradient, sums = sum_in_order(parts, [one.detach() for one in like], num_leaves=num_leaves)
    give_gradient(trained, gradient)
    assert sums is not None
    return {name: sums[i] for i, name in enumerate(terms)}


def sum_parts(
    budget: AtomBudget, atoms: Sequence[MicroBatch], trained: Sequence[nn.Parameter], run: Run, *, first: int,
    num_leaves: int, terms: Sequence[str], device: torch.device,
) -> dict[tuple[int, int], GradientSum]:  # fmt: skip
    """What a rank whose first atom is `first` has to add, tried again where memory runs out."""
    generators = random_state()
    for attempt in range(1, TRIES + 1):
        tree: TreeSum[GradientSum] = TreeSum(num_leaves, add_gradients)
        at = 0
        try:
            for at, atom in _moved(budget, atoms, device):
                sums = run(atom)
                leaf = [*take_gradient(trained), _stacked(sums, terms, device)]
                tree.add((0, first + at), leaf)
                if budget.leanness >= ON_HOST and device.type != "cpu":
                    _move_to_host(tree)
            budget.note_step(is_clean=attempt == 1)
            return tree.parts
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error):
                raise
            said = first_line(error)  # Only text leaves this block: the traceback holds the tensors of the try.
        tree.parts.clear()
        take_gradient(trained)
        free_memory(device, said=said)
        restore_random(generators)
        if attempt == TRIES:
            raise does_not_fit(atoms[at], said, place=first + at)
        budget.recoveries += 1
        budget.leanness = min(budget.leanness + 1, ON_HOST)
        how = (
            "one atom on the device"
            if budget.leanness == ONE_ATOM
            else "one atom on the device, and waiting sums on the host"
        )
        budget.say(f"atom {first + at} of a step ran out of memory ({said}); the step runs again with {how}")
    raise AssertionError("unreachable")


def _moved(
    budget: AtomBudget, atoms: Sequence[MicroBatch], device: torch.device
) -> Iterator[tuple[int, MicroBatch]]:  # fmt: skip
    """The atoms on the device, a few at a time, with their place."""
    number = 1 if budget.leanness else max(1, budget.resident)
    order = run_order(len(atoms), budget.order_seed)
    for begin in range(0, len(order), number):
        places = order[begin : begin + number]
        group = [atoms[at].to(device, non_blocking=True) for at in places]
        while group:
            yield places[-len(group)], group.pop(0)


def run_order(number: int, seed: int | None = None) -> list[int]:
    """The order in which atoms are run: their own, unless a seed or the variable asks for another."""
    asked = os.environ.get(ORDER, "") if seed is None else f"shuffled:{seed}"
    if not asked:
        return list(range(number))
    word, _, text = asked.partition(":")
    if word != "shuffled" or not (text or "0").isdigit():
        raise ConfigError("not an order of atoms", seen=f"{ORDER}={asked}", do=f"write {ORDER}=shuffled:1, or unset it")
    return [int(i) for i in np.random.default_rng((int(text or 0), number)).permutation(number)]


def _stacked(sums: Mapping[str, Tensor], terms: Sequence[str], device: torch.device) -> Tensor:
    none = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([sums[name].detach().to(torch.float64) if name in sums else none for name in terms])


def _move_to_host(tree: TreeSum[GradientSum]) -> None:
    """Sums that wait for more than the next atom, into memory of the host that the device reads by itself."""
    for node, part in tree.parts.items():
        if node[0]:
            tree.parts[node] = [None if one is None else _on_host(one) for one in part]


def _on_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
    return host.copy_(value, non_blocking=True)  # read again on the same stream, never by the host


def does_not_fit(atom: MicroBatch, said: str, *, place: int | None = None) -> MemoryLimitError:
    """The error of an atom that is too large for the memory there is."""
    shown = ", ".join(map(str, atom.sample_ids[:8])) + (", ..." if atom.num_samples > 8 else "")
    which = "an atom of the first step" if place is None else f"atom {place} of a step"
    return MemoryLimitError(
        f"{which} does not fit into memory",
        seen=f"{cells_of(atom):,} cells of the samples {shown}; {said}",
        do="begin a run with narrower atoms (train.atom_cells), or set gradient_checkpointing; an atom is never cut",
    )
