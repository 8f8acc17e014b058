"""How packed rows of one model are made right: by our attention, or by modules that are called by group; kept for it.

modes, the fastest first -> search -> outputs and gradients beside those of the samples alone -> a plan, or the reasons
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

from torch import nn

from truebatch.errors import AttentionError
from truebatch.hf.mixers.group_call import called_by_group
from truebatch.hf.mixers.group_mask import masks_made_by_group
from truebatch.hf.mixers.mixer_search import Mixers, find_mixers, gradients_agree, is_right_packed
from truebatch.hf.mixers.trial_rows import trial_rows
from truebatch.training.memory.oom import is_out_of_memory

Way = Literal["table", "rows", "dense"]
"""table: attention reads the segment table of packed rows. rows: attention is called by group, too, with masks made for
each group. dense: the same with masks cut out of those of the packed rows."""
Table = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """What is open around packed calls of a model."""

    way: Way = "table"
    mixers: Mixers = field(default_factory=Mixers)

    @property
    def is_plain(self) -> bool:
        """Attention by the segment table is all that it needs."""
        return self.way == "table" and not self.mixers.modules

    def __str__(self) -> str:
        if not self.mixers.modules:
            return ""
        whole = [kind for kind in self.mixers.kinds if kind in self.mixers.whole_kinds]
        grouped = [kind for kind in self.mixers.kinds if kind not in self.mixers.whole_kinds]
        names = ", ".join(grouped)
        parts = [f"{', '.join(whole)} in one row with a table"] if whole else []
        if grouped:
            parts.append(
                f"{names} by groups of equal length" if self.mixers.equal else f"{names} by groups of similar length"
            )
        return "; ".join(parts)


PLAIN = PackingPlan()
_plans: WeakKeyDictionary[nn.Module, PackingPlan | AttentionError] = WeakKeyDictionary()


def known_plan(model: nn.Module) -> PackingPlan | None:
    """What `find_plan` has found for this model; None where it was not asked, or found no way."""
    found = _plans.get(model)
    return None if isinstance(found, AttentionError) else found


def find_plan(model: nn.Module, table: Table, *, is_plain: bool) -> PackingPlan:
    """The plan of this model, found once. Raises AttentionError with the reason of every way.

    `is_plain`: nothing but attention by the table is seen to mix its cells; if a trial agrees, nothing is searched.
    """
    found = _plans.get(model)
    if found is None:
        try:
            is_enough = is_plain and is_right_packed(model, partial(table, model))
            found = PLAIN if is_enough else _searched(model, table)
        except AttentionError as error:
            found = error
        _plans[model] = found
    if isinstance(found, AttentionError):
        raise found
    return found


def _searched(model: nn.Module, table: Table) -> PackingPlan:
    reasons = {}
    ways: tuple[Way, ...] = ("table", "rows", "dense")
    for (stacks, positioned), way in itertools.product(((False, False), (False, True), (True, False)), ways):
        plan = PackingPlan(way)
        try:
            mode = partial(plan_opened, model, plan, table)
            mixers = find_mixers(model, mode, stacks=stacks, positioned=positioned)
            found = replace(plan, mixers=mixers)
            if positioned and not is_right_packed(model, partial(plan_opened, model, found, table)):
                continue  # the reason of this way is known
            if gradients_agree(model, mode, mixers):
                return _with_kernels(model, found, table)
            reasons[way] = "outputs are those of the samples alone, gradients are not"
        except Exception as error:  # whatever a model raises in rows it was not written for speaks against this way
            if is_out_of_memory(error):
                raise
            said = (
                f"{error.wrong}: {error.seen}"
                if isinstance(error, AttentionError)
                else f"{type(error).__name__}: {error}"
            )
            reasons[way] = said.splitlines()[0]
    raise AttentionError(
        "no way to pack the rows of this model was found",
        seen="; ".join(f"{way}: {why}" for way, why in reasons.items()),
        do="plan the padded layout with right padding, or groups of equal length",
    )


def _with_kernels(model: nn.Module, plan: PackingPlan, table: Table) -> PackingPlan:
    """The plan with every class of modules in one row whose kernels keep the samples of a trial apart."""
    if trial_rows(model).targets is not None:
        return plan  # two tables, and kernels read one
    without = partial(plan_opened, model, replace(plan, mixers=Mixers()), table)
    for kind in plan.mixers.kinds:
        names = {name for name in plan.mixers.modules if type(model.get_submodule(name)).__name__ == kind}
        mixers = plan.mixers
        mixers = replace(mixers, whole=mixers.whole | names, whole_kinds=mixers.whole_kinds | {kind})
        tried = replace(plan, mixers=mixers)
        if is_right_packed(model, partial(plan_opened, model, tried, table)) and gradients_agree(
            model, without, tried.mixers
        ):
            plan = tried
    return plan


@contextmanager
def plan_opened(model: nn.Module, plan: PackingPlan, table: Table) -> Iterator[None]:
    """Packed calls go as the plan says while open."""
    around = table(model) if plan.way == "table" else masks_made_by_group(dense=plan.way == "dense")
    mixers = plan.mixers
    with around, called_by_group(model, mixers.modules, equal=mixers.equal, whole=mixers.whole):
        yield
