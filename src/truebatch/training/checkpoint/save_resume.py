"""A run as a checkpoint and back: weights, optimisers, loss scaling, random generators, position.

Frozen parameters are not written: the model is built with them. A sum of each says whether they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import CheckpointError, TruebatchError
from truebatch.training.checkpoint.retention import list_checkpoints, mark_best, mark_kept, mend_best
from truebatch.training.checkpoint.sharded_store import save_sharded_checkpoint
from truebatch.training.checkpoint.state_dict import optimisers_state, restore_optimisers
from truebatch.training.checkpoint.store import Checkpoint, load_checkpoint, load_newest, save_checkpoint
from truebatch.training.distributed.collectives import all_gather_list, broadcast_from_rank0, on_every_rank, rank
from truebatch.training.distributed.fsdp import deal_out, split_rows, whole_sum
from truebatch.training.optim.param_groups import check_settings
from truebatch.training.random_state import random_state, restore_random
from truebatch.training.step import StepEngine
from truebatch.training.train_state import TrainState

CALLBACKS = "attendants"
"""The part of a checkpoint with the states of callbacks; the name is that of the first version."""


def save_run(
    folder: Path,
    engine: StepEngine,
    state: TrainState,
    *,
    fingerprint: str,
    keep: int,
    best: bool,
    kept: bool = False,
) -> str:
    """Write a checkpoint of this step and mark it if it is the best so far, or kept. Rank 0 writes it while the others
    wait; of sharded parameters every rank writes its rows.

    Gives words for what is wrong with what was saved; empty when nothing is. What a rank cannot write stops all ranks,
    with its reason.
    """
    checkpoint = Checkpoint(state.step, _parts(engine, state), fingerprint, state.best())

    def mark() -> None:
        if best and checkpoint.best is not None:
            mark_best(folder, checkpoint.best.step, about={"loss": checkpoint.best.loss})
        if kept:
            mark_kept(folder, checkpoint.step)

    problem = _save(folder, checkpoint, keep=keep, is_sharded=engine.is_sharded)
    on_every_rank(lambda: mark() if rank() == 0 else None)
    return problem


def _save(folder: Path, checkpoint: Checkpoint, *, keep: int, is_sharded: bool) -> str:
    if broadcast_from_rank0(rank() == 0 and _is_saved(folder, checkpoint.step, checkpoint.parts)):
        return ""
    if is_sharded:
        return save_sharded_checkpoint(folder, checkpoint, keep=keep).problem
    saved = on_every_rank(lambda: save_checkpoint(folder, checkpoint, keep=keep) if rank() == 0 else None)[0]
    assert saved is not None
    return saved.problem


def _is_saved(folder: Path, step: int, parts: Mapping[str, Any]) -> bool:
    """A checkpoint of this very position need not be written twice (the best one, then the one of the epoch)."""
    newest = next((s for s in reversed(list_checkpoints(folder)) if s.step == step and s.is_good), None)
    try:
        return newest is not None and bool(
            load_checkpoint(newest.path, whole=False).parts["progress"] == parts["progress"]
        )
    except TruebatchError:
        return False  # Corrupt, and skipped when the run was resumed: it is written again.


def _parts(engine: StepEngine, state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds; all ranks take part, and of sharded parameters each has its rows."""
    frozen = frozen_parameters(engine.model)
    weights = {name: value for name, value in engine.model.state_dict().items() if not _is_part_of(frozen, name)}
    optimisers = optimisers_state({g.name: g.optimiser for g in engine.groups}, list(engine.model.named_parameters()))
    generators = all_gather_list([random_state()])
    return {
        "model": split_rows(weights),
        "frozen": {name: _sum_of(value) for name, value in frozen.items()},
        "optimisers": split_rows(optimisers),
        "groups": {group.name: dict(group.settings) for group in engine.groups},
        "scaler": engine.scaler.state_dict() if engine.scaler is not None else {},
        "random": generators[0],
        "random_of_other_ranks": generators[1:],
        "progress": state.as_dict(),
        CALLBACKS: {one.name: dict(one.state()) for one in engine.callbacks},
    }


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that training does not change, by every name they have."""
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def _is_part_of(frozen: Mapping[str, Tensor], name: str) -> bool:
    """True for a frozen parameter and for what its quantisation stores beside it, such as `weight.absmax`."""
    while name:
        if name in frozen:
            return True
        name = name.rpartition(".")[0]
    return False


def _sum_of(value: Tensor) -> float:
    return float(whole_sum(value.sum(dtype=torch.float64)))


def _check_frozen(engine: StepEngine, parts: Any) -> None:
    sums = parts.get("frozen", {})
    for name, value in frozen_parameters(engine.model).items():
        # Sums of the same numbers may be rounded differently on another device.
        allowed = 1e-6 * _sum_of(value.abs()) + 1e-12
        if name not in parts["model"] and not abs(_sum_of(value) - sums.get(name, math.nan)) <= allowed:
            raise CheckpointError(
                f"the frozen parameter {name!r} is not what it was when the run began",
                seen=f"sum {_sum_of(value):.9g}, {sums.get(name, math.nan):.9g} in the checkpoint",
                do="bring the model back that the run began with, or start another run with --out",
            )


def _check_tensors(engine: StepEngine, saved: Any) -> None:
    for name, value in engine.model.state_dict().items():
        for what in ("dtype", "shape") if name in saved else ():
            now, then = getattr(value, what), getattr(saved[name], what)
            if now != then:
                raise CheckpointError(
                    f"{name!r} has another {what} than in the checkpoint",
                    seen=f"{now} now, {then} in the checkpoint",
                    do="build the model as it was when the run began, or start another run with --out",
                )


def resume_run(folder: Path, engine: StepEngine) -> tuple[TrainState, tuple[str, ...]] | None:
    """Bring the newest good checkpoint back into the engine; None if there is none. Also why newer ones were skipped.

    Rank 0 mends the mark of the best checkpoint, which a kill after the save may have left at an earlier one.
    """
    if not folder.is_dir():
        return None
    loaded = load_newest(folder, whole=not engine.is_sharded)
    if loaded is None:
        return None
    state = restore(engine, loaded.checkpoint.parts)
    if rank() == 0:
        mend_best(folder, state.best())
    return state, loaded.rejected


def restore(engine: StepEngine, parts: Any) -> TrainState:
    """Bring a checkpoint's parts back into the engine, bit for bit."""
    _check_tensors(engine, parts["model"])
    here = engine.model.state_dict()
    shards = {name: deal_out(value, here.get(name, value)) for name, value in parts["model"].items()}
    with torch.no_grad():
        absent, extra = engine.model.load_state_dict(shards, strict=False)
    frozen = frozen_parameters(engine.model)
    missing = [name for name in absent if name not in frozen]
    if missing or extra:
        raise CheckpointError(
            "the checkpoint belongs to another model",
            seen=f"missing {missing[:4]}, extra {extra[:4]}",
            do="build the model as it was when the run began, or start another run with --out",
        )
    _check_frozen(engine, parts)
    check_settings(engine.groups, parts.get("groups", {}))
    restore_optimisers(
        {g.name: g.optimiser for g in engine.groups}, parts["optimisers"], engine.model.named_parameters()
    )
    if engine.scaler is not None and parts["scaler"]:
        engine.scaler.load_state_dict(parts["scaler"])
    generators = [parts["random"], *parts.get("random_of_other_ranks", ())]
    restore_random(generators[rank() % len(generators)])
    for one in engine.callbacks:
        one.restore(parts.get(CALLBACKS, {}).get(one.name, {}))
    return TrainState.from_dict(parts["progress"])
