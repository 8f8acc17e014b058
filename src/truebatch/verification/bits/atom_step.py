"""A step of whole atoms, and the cuts under which its loss and gradient are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from truebatch.batch.microbatch import MicroBatch
from truebatch.testing.failpoints import armed
from truebatch.training.exactness.atoms import AtomBudget, sum_parts
from truebatch.training.exactness.gradient_sum import GradientSum, add_gradients, take_gradient
from truebatch.training.exactness.tree import TreeSum
from truebatch.training.step import StepEngine, run_atom


@dataclass(frozen=True, slots=True, eq=False)
class AtomStep:
    """A step of one layout, ready to be run."""

    engine: StepEngine
    atoms: Sequence[MicroBatch]
    counts: Mapping[str, int]
    width: int

    def sums(self, budget: AtomBudget, *, ranks: int = 1) -> GradientSum:
        """Gradient and loss of the step, as so many ranks add them up."""
        parameters = list(self.engine.groups[0].parameters)
        run, each = partial(run_atom, self.engine, counts=self.counts, epoch=0), -(-len(self.atoms) // ranks)
        whole: TreeSum[GradientSum] = TreeSum(len(self.atoms), add_gradients)
        for first in range(0, len(self.atoms), each):
            mine = self.atoms[first : first + each]
            parts = sum_parts(
                budget, mine, parameters, run, first=first, num_leaves=len(self.atoms), terms=sorted(self.counts),
                device=self.engine.device,
            )  # fmt: skip
            for node, part in sorted(parts.items()):
                whole.add(node, part)
        (found,) = whole.parts.values()
        take_gradient(parameters)
        return found


Cut = Callable[[AtomStep], GradientSum]


def _after_lost_memory(step: AtomStep) -> GradientSum:
    with armed(f"step.backward:oom:{len(step.atoms) // 2 + 1}"):
        return step.sums(AtomBudget(resident=4))


CUTS: dict[str, Cut] = {
    "the same atoms again": lambda step: step.sums(AtomBudget()),
    "atoms in another order": lambda step: step.sums(AtomBudget(order_seed=1)),
    "4 atoms resident, another order": lambda step: step.sums(AtomBudget(resident=4, order_seed=2)),
    "16 atoms resident": lambda step: step.sums(AtomBudget(resident=16)),
    "dealt to 2 ranks": lambda step: step.sums(AtomBudget(), ranks=2),
    "dealt to 3 ranks": lambda step: step.sums(AtomBudget(), ranks=3),
    "dealt to 4 ranks": lambda step: step.sums(AtomBudget(), ranks=4),
    "run again after memory ran out": _after_lost_memory,
}
"""How the step is cut; the sums of ranks are added up in one process, in the order in which ranks add them."""
