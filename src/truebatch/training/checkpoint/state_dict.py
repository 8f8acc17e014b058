"""What a run must remember beside its weights: optimisers, schedules, loss scaling, buffers.

Parameters are known by name, never by position, so a reordered model still gets its own state back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import CheckpointError
from truebatch.training.checkpoint.shard_files import StoredRows
from truebatch.training.distributed.fsdp import deal_out

State = dict[str, Any]
_OWN_KEYS = ("params", "param_names")


def optimiser_state(optimiser: Any, named: Iterable[tuple[str, Tensor]]) -> State:
    """The state of a torch optimiser with parameters by name (`module.named_parameters()`)."""
    names = {id(parameter): name for name, parameter in named}
    groups = [[_name_of(names, parameter) for parameter in group["params"]] for group in optimiser.param_groups]
    raw = optimiser.state_dict()
    numbers = [number for group in raw["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, (name for group in groups for name in group), strict=True))
    shapes = {names[id(p)]: list(p.shape) for group in optimiser.param_groups for p in group["params"]}
    return {
        "kind": _kind(optimiser),
        "shapes": shapes,
        "state": {by_number[number]: values for number, values in raw["state"].items()},
        "param_groups": [
            {**{key: value for key, value in group.items() if key not in _OWN_KEYS}, "params": group_names}
            for group, group_names in zip(raw["param_groups"], groups, strict=True)
        ],
    }


def restore_optimiser(optimiser: Any, state: State, named: Iterable[tuple[str, Tensor]]) -> None:
    """Give an optimiser the state back that `optimiser_state` took, bit for bit and in the dtypes it had.

    Raises `CheckpointError` when the kind of optimiser, a parameter's name or shape, or the groups differ.
    """
    names = {id(parameter): name for name, parameter in named}
    groups = [[_name_of(names, parameter) for parameter in group["params"]] for group in optimiser.param_groups]
    _compare("optimisers", state["kind"], _kind(optimiser))
    _compare_shapes(state["shapes"], {names[id(p)]: list(p.shape) for g in optimiser.param_groups for p in g["params"]})
    _compare_groups(state["param_groups"], groups)
    optimiser.load_state_dict(_by_number(optimiser, state, groups))
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if saved := state["state"].get(names[id(parameter)]):
                # torch casts state to the dtype of the parameter; fp32 moments of bf16 weights would lose bits.
                optimiser.state[parameter] = _exact(saved, optimiser.state[parameter], parameter)


def optimisers_state(optimisers: Mapping[str, Any], named: Iterable[tuple[str, Tensor]]) -> State:
    """The states of several optimisers by name."""
    parameters = list(named)
    return {name: optimiser_state(optimiser, parameters) for name, optimiser in optimisers.items()}


def restore_optimisers(optimisers: Mapping[str, Any], states: State, named: Iterable[tuple[str, Tensor]]) -> None:
    """Give several optimisers their states back; the names must be the same."""
    _compare("names of optimisers", sorted(states), sorted(optimisers))
    parameters = list(named)
    for name, optimiser in optimisers.items():
        restore_optimiser(optimiser, states[name], parameters)


def schedule_state(schedule: Any) -> State:
    """The state of a torch learning-rate scheduler or gradient scaler (anything with `state_dict`)."""
    return {"kind": _kind(schedule), "values": dict(schedule.state_dict())}


def restore_schedule(schedule: Any, state: State) -> None:
    """Give a scheduler or scaler its state back; another kind, or other fields, raise `CheckpointError`."""
    _compare("schedules", state["kind"], _kind(schedule))
    _compare("fields of the schedule", sorted(state["values"]), sorted(schedule.state_dict()))
    schedule.load_state_dict(dict(state["values"]))


SavedBuffers = list[tuple[nn.Module, str, Tensor, Tensor]]
"""Module, name, the buffer itself and a copy of what it held."""


def copy_buffers(model: nn.Module) -> SavedBuffers:
    """Copies of a model's buffers, for `restore_buffers`."""
    return [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@torch.no_grad()
def restore_buffers(saved: SavedBuffers) -> None:
    """Put buffers back, written in place or replaced as they may have been since."""
    for module, name, buffer, before in saved:
        module._buffers[name] = buffer
        buffer.copy_(before)


def _name_of(names: Mapping[int, str], parameter: Tensor) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            "an optimiser holds a parameter without a name",
            seen=f"a parameter of shape {tuple(parameter.shape)}, not among {len(names)} named ones",
            do="give the named parameters of every module the optimiser updates",
        )
    return names[id(parameter)]


def _kind(thing: Any) -> str:
    # Accelerate and others wrap what they are given.
    inner = getattr(thing, "optimizer", None) if hasattr(thing, "param_groups") else getattr(thing, "scheduler", None)
    return type(inner if inner is not None and hasattr(inner, "state_dict") else thing).__name__


def _compare(what: str, saved: Any, here: Any) -> None:
    if saved != here:
        raise CheckpointError(
            f"the {what} of the checkpoint are not those of this run",
            seen=f"saved: {saved}; here: {here}",
            do="build the run as it was when the checkpoint was saved, or start it afresh",
        )


def _compare_shapes(saved: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> None:
    for name in sorted({*saved, *here}):
        if saved.get(name) != here.get(name):
            seen = f"{name}: shape {saved.get(name, 'absent')} in the checkpoint, {here.get(name, 'absent')} here"
            raise CheckpointError(
                "the parameters of an optimiser differ from those in the checkpoint",
                seen=seen,
                do="build the model as it was when the checkpoint was saved, or start the run afresh",
            )


def _compare_groups(saved: list[State], here: list[list[str]]) -> None:
    _compare("parameter groups", [sorted(group["params"]) for group in saved], [sorted(group) for group in here])


def _by_number(optimiser: Any, state: State, groups: list[list[str]]) -> State:
    """The state as torch numbers it here: parameters in the order of this optimiser."""
    raw = optimiser.state_dict()["param_groups"]
    flat = [name for group in groups for name in group]
    numbers = dict(zip(flat, (n for group in raw for n in group["params"]), strict=True))
    return {
        "state": {numbers[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**{key: value for key, value in now.items() if key in _OWN_KEYS}, **_without_own(saved)}
            for now, saved in zip(raw, state["param_groups"], strict=True)
        ],
    }


def _without_own(group: State) -> State:
    return {key: value for key, value in group.items() if key not in _OWN_KEYS}


def _exact(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """The saved value in its own dtype, on the device torch has chosen for it, sharded where its parameter is."""
    if isinstance(saved, Tensor):
        device = loaded.device if isinstance(loaded, Tensor) else saved.device
        return deal_out(saved.detach().to(device=device, copy=True), parameter)
    if isinstance(saved, StoredRows):
        return deal_out(saved, parameter)
    if isinstance(saved, Mapping):
        return {key: _exact(value, loaded[key], parameter) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_exact(value, other, parameter) for value, other in zip(saved, loaded, strict=True))
    return saved
