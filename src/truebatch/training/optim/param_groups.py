"""What is updated: named groups of parameters, each with its own optimiser, loss terms, clipping and schedule.

All gradients of a step are taken at the parameters before it; then all groups update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from truebatch.errors import CheckpointError, ConfigError
from truebatch.training.config import TrainConfig
from truebatch.training.optim.lr_schedules import Schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Parameters that are updated together."""

    name: str = "main"
    optimiser: torch.optim.Optimizer
    terms: tuple[str, ...] | None = None
    """The loss terms whose gradient these parameters follow; None: all of them."""
    max_grad_norm: float | None = 1.0
    """The gradient of this group is scaled down to this norm, over all its parameters."""
    schedule: Schedule = field(default_factory=Schedule)
    base_rates: tuple[float, ...] = ()
    """The learning rate of each of the optimiser's own groups at factor 1; filled in by `make_groups`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What decides its updates, as it was when training began, by name; filled in by `make_groups`."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the optimiser."""
        return [p for part in self.optimiser.param_groups for p in part["params"]]

    def set_rate(self, step: int, num_steps: int) -> float:
        """Set the learning rate of a step; the first of them is returned for the log."""
        factor = self.schedule.factor(step, num_steps)
        for part, base in zip(self.optimiser.param_groups, self.base_rates, strict=True):
            part["lr"] = base * factor
        return self.base_rates[0] * factor


def make_groups(groups: Sequence[Group], model: nn.Module) -> tuple[Group, ...]:
    """Check that every trainable parameter belongs to exactly one group, and remember the base learning rates."""
    _refuse_closures(groups)
    names = [g.name for g in groups]
    if len(set(names)) != len(names) or not groups:
        raise ConfigError("every optimiser needs a name of its own", seen=f"names {names}", do="name them differently")
    by_id = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, str] = {}
    for group in groups:
        for p in group.parameters:
            if id(p) not in by_id:
                raise ConfigError(
                    f"optimiser {group.name!r} holds a parameter the model does not have",
                    seen=f"shape {tuple(p.shape)}",
                    do="build the optimiser from model.parameters(), after the model is final",
                )
            if id(p) in owners:
                raise ConfigError(
                    f"parameter {by_id[id(p)]!r} is updated twice",
                    seen=f"optimisers {owners[id(p)]!r} and {group.name!r}",
                    do="give each parameter to one optimiser",
                )
            owners[id(p)] = group.name
    _refuse_forgotten(model, owners)
    return tuple(_with_rates(g) for g in groups)


def refuse_terms_of_shards(groups: Sequence[Group], *, is_sharded: bool) -> None:
    """The gradient of some terms alone is asked for parameter by parameter, and FSDP2 trains other tensors than those."""
    for group in groups if is_sharded else ():
        if group.terms is None:
            continue
        raise ConfigError(
            "an optimiser that follows some loss terms alone does not go with sharded parameters",
            seen=f"optimiser {group.name!r} follows {list(group.terms)}",
            do="train this model without shard",
        )


def _refuse_closures(groups: Sequence[Group]) -> None:
    for group in groups:
        if isinstance(group.optimiser, torch.optim.LBFGS):
            raise ConfigError(
                f"optimiser {group.name!r} takes the gradient of a step several times",
                seen=type(group.optimiser).__name__,
                do="use an optimiser that updates from one gradient, such as AdamW or SGD",
            )


def _refuse_forgotten(model: nn.Module, owners: Mapping[int, str]) -> None:
    forgotten = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in owners]
    if forgotten:
        raise ConfigError(
            f"{len(forgotten)} trainable parameters belong to no optimiser",
            seen=f"{forgotten[:5]}{' ...' if len(forgotten) > 5 else ''}",
            do="add them to an optimiser, or freeze them with requires_grad_(False)",
        )


def _with_rates(group: Group) -> Group:
    rates = tuple(float(part.get("initial_lr", part["lr"])) for part in group.optimiser.param_groups)
    return replace(group, base_rates=rates, settings=_settings_of(group, rates))


_HOW = ("params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
"""Of an optimiser's options, those that change nothing in its updates; learning rates are taken at factor 1."""


def _settings_of(group: Group, rates: Sequence[float]) -> dict[str, Any]:
    found = {
        "terms": None if group.terms is None else list(group.terms),
        "max_grad_norm": group.max_grad_norm,
        **{f"schedule.{name}": value for name, value in asdict(group.schedule).items()},
    }
    for at, (part, rate) in enumerate(zip(group.optimiser.param_groups, rates, strict=True)):
        options = {"lr": rate, **{name: value for name, value in part.items() if name not in _HOW}}
        found |= {f"param_groups[{at}].{name}": _plain(value) for name, value in options.items()}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def check_settings(groups: Sequence[Group], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `CheckpointError` by name if a group's settings are not those the run began with."""
    for group in groups:
        then = saved.get(group.name, {})
        for name, value in then.items():
            if group.settings.get(name) != value:
                raise CheckpointError(
                    f"optimiser {group.name!r} has another {name} than when the run began",
                    seen=f"{name}: {value!r} then, {group.settings.get(name)!r} now",
                    do="set it back, or start another run with --out: the steps to come would not be those of this run",
                )


def check_terms(groups: Sequence[Group], terms: Sequence[str], *, is_first: bool = True) -> None:
    """Every loss term must move some group; in the first step every term a group names must exist too."""
    unknown = sorted({t for g in groups for t in g.terms or ()} - set(terms))
    if unknown and is_first:
        raise ConfigError(
            "an optimiser follows loss terms the objective does not give",
            seen=f"{unknown}; the objective gives {sorted(terms)}",
            do="name terms that `sums` returns",
        )
    followed = set(terms) if any(g.terms is None for g in groups) else {t for g in groups for t in g.terms or ()}
    idle = sorted(set(terms) - followed)
    if idle:
        raise ConfigError(
            "some loss terms move no parameters",
            seen=f"{idle}",
            do="add them to the terms of an optimiser, or leave them out of `sums`",
        )


def default_group(model: nn.Module, config: TrainConfig) -> Group:
    """AdamW over all trainable parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(
            "nothing can be trained", seen="no parameter has requires_grad", do="unfreeze some parameters"
        )
    fused = _has_fused_kernel(trained)
    optimiser = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused)
    if fused and not trained[0].is_cuda:
        optimiser.register_step_pre_hook(_unfuse_strided)
    return Group(optimiser=optimiser, max_grad_norm=config.max_grad_norm, schedule=config.lr_schedule())


def _has_fused_kernel(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch updates these in one pass over each, instead of a pass for every operation of the formula."""
    if all(p.is_cuda for p in parameters):
        return True
    return all(p.device.type == "cpu" and p.is_floating_point() and not hasattr(p, "full_tensor") for p in parameters)


def _unfuse_strided(optimiser: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """The fused kernels of a CPU run through memory: a gradient that lies in it in another order than its parameter would
    reach the wrong entries, so such an update takes the other way."""
    for part in optimiser.param_groups:
        part["fused"] = all(
            p.is_contiguous() and (p.grad is None or (p.grad.is_contiguous() and p.grad.layout is torch.strided))
            for p in part["params"]
        )
