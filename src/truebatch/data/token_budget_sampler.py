"""Batches by token budget for loaders of other people: torch's DataLoader, accelerate, Lightning, torchdata.

lengths, cells -> plan of an epoch -> batches of indices, as many on every rank -> DataLoader(batch_sampler=...)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from truebatch.errors import ConfigError, PlanError, RunError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.rows import Layout
from truebatch.planning.sample_table import check_lengths


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of indices, none with more than `cells` cells, every sample once an epoch, in a new order every epoch.

    Packed rows count the tokens of a batch, padded ones the samples times the longest. Every rank has as many batches as
    the others, and no sample is left out or repeated. Ranks are those of torch.distributed unless `rank` and `ranks` are
    given; `ranks` alone gives all batches, as many as a multiple of it, for an accelerate that deals them out itself.

    >>> from truebatch import TokenBudgetSampler
    >>> sampler = TokenBudgetSampler([3, 9, 4, 7, 5], cells=12, seed=1)
    >>> sorted(index for batch in sampler for index in batch)
    [0, 1, 2, 3, 4]
    >>> sampler.set_epoch(1)  # another order
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        cells: int,
        layout: Layout = "packed",
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if rank is not None and (ranks is None or not 0 <= rank < ranks):
            raise ConfigError(
                "a rank is one of the ranks",
                seen=f"rank={rank}, ranks={ranks}",
                do="give both, for example rank=0, ranks=2",
            )
        self.lengths = check_lengths(lengths)
        self.config = PlanConfig(layout=layout, cells=cells, seed=seed, micro_batches_per_step=1)
        self.epoch = 0
        self._next = 0
        self._rank, self._ranks = rank, ranks
        plan = build_plan(self.lengths, self.config, epoch=0)
        self._fingerprint = plan.fingerprint
        self._known: dict[tuple[int, int | None, int], list[list[int]]] = {}
        self._batches_of(0, plan)  # what cannot be planned is refused here and not in the first epoch

    @property
    def sampler(self) -> TokenBudgetSampler:
        """Itself: accelerate and Lightning look for `set_epoch` at the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is read next, from its first batch unless it is the one a state was loaded for."""
        if epoch != self.epoch:
            self.epoch, self._next = epoch, 0

    def __len__(self) -> int:
        """Batches of this rank in this epoch, those before a loaded state too."""
        return len(self._batches_of(self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this epoch that are left; once they are read, all of them again."""
        return SamplerIterator(self)

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Where this rank is. A loader with workers reads ahead: `batches` is how many of this epoch are done."""
        done = self._next if batches is None else batches
        return {"epoch": self.epoch, "batches": done, "plan": self._fingerprint, "ranks": self._place()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Other lengths, budgets, seeds or numbers of ranks are refused: they give other batches."""
        now = self.state_dict()
        for name in ("plan", "ranks"):
            if state[name] != now[name]:
                raise RunError(
                    "this state is of other batches",
                    seen=f"{name}={state[name]!r} in the state, {now[name]!r} now",
                    do="keep lengths, cells, layout, seed and the number of ranks, or begin the epoch again",
                )
        self.epoch, self._next = int(state["epoch"]), int(state["batches"])

    def _place(self) -> tuple[int | None, int]:
        if self._ranks is not None:
            return self._rank, self._ranks
        is_open = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_open else (0, 1)

    def _batches_of(self, epoch: int, plan: Plan | None = None) -> list[list[int]]:
        rank, ranks = self._place()
        if (epoch, rank, ranks) not in self._known:
            plan = plan or build_plan(self.lengths, self.config, epoch=epoch)
            whole = [rows.ids.tolist() for step in range(plan.num_steps) for rows in plan.step(step)[0]]
            batches = _in_multiples([ids for ids in whole if ids], ranks)
            self._known = {(epoch, rank, ranks): batches if rank is None else batches[rank::ranks]}
        return self._known[epoch, rank, ranks]


class SamplerIterator(Iterator[list[int]]):
    """The batches of one epoch; it moves its sampler along, and torchdata's StatefulDataLoader keeps its state."""

    def __init__(self, sampler: TokenBudgetSampler) -> None:
        self.sampler = sampler
        self._batches = sampler._batches_of(sampler.epoch)

    def __next__(self) -> list[int]:
        """The next batch of indices."""
        number = self.sampler._next
        if number >= len(self._batches):
            self.sampler._next = 0
            raise StopIteration
        self.sampler._next = number + 1
        return self._batches[number]

    def state_dict(self) -> dict[str, Any]:
        """Of the sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the sampler."""
        self.sampler.load_state_dict(state)
        self._batches = self.sampler._batches_of(self.sampler.epoch)


def _in_multiples(batches: list[list[int]], ranks: int) -> list[list[int]]:
    """As many batches as a multiple of `ranks`: those with most samples are halved, so that no rank waits for another."""
    batches = list(batches)
    while len(batches) % ranks:
        largest = int(np.argmax([len(ids) for ids in batches]))
        ids = batches[largest]
        if len(ids) < 2:
            raise PlanError(
                "there are too few samples for every rank to have as many batches",
                seen=f"{len(batches)} batches of one sample each, {ranks} ranks",
                do="use fewer ranks, or a number of samples that they divide",
            )
        batches[largest : largest + 1] = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
    return batches
