"""What in a model would make its result depend on the cut, found before training begins.

The law holds where the objective is a sum over samples, a forward pass changes no buffer, randomness is keyed by sample
and no operation mixes samples. Everything else has a name here, and is refused unless allowed by that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from truebatch.errors import LawError


@dataclass(frozen=True, slots=True)
class Coupling:
    """One reason why the cut of a step would show in its result."""

    name: str
    where: str
    words: str
    fix: str


def find_couplings(model: nn.Module) -> list[Coupling]:
    """Every coupling that can be seen from outside: by module type, and by the configuration of a library model."""
    found: list[Coupling] = []
    for name, module in model.named_modules():
        found += _of_module(name or "the model", module)
    config = getattr(model, "config", None)
    return found + (_of_config(config) if config is not None else [])


def refuse_couplings(model: nn.Module, allow: Sequence[str]) -> list[Coupling]:
    """Raise LawError for couplings that are not allowed by name; return those that are."""
    found = find_couplings(model)
    refused = [c for c in found if c.name not in allow]
    if refused:
        first = refused[0]
        names = sorted({c.name for c in refused})
        raise LawError(
            f"training would depend on how steps are cut: {', '.join(names)}",
            seen=f"{first.where}: {first.words}" + (f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""),
            do=f"{first.fix}; or allow it by name (allow={names}), and every log says 'equal in distribution'",
        )
    return found


def _of_module(name: str, module: nn.Module) -> Iterable[Coupling]:
    kind = type(module).__name__
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        yield Coupling(
            "dropout",
            f"{name} ({kind}, p={module.p})",
            "its mask is drawn for the micro-batch, not for the sample",
            "use truebatch.KeyedDropout, or p=0",
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
        yield Coupling(
            "batch statistics",
            f"{name} ({kind})",
            "it normalises over whatever shares its micro-batch",
            "freeze it with .eval(), or use LayerNorm, GroupNorm or RMSNorm",
        )
    if isinstance(module, nn.RNNBase) and module.dropout > 0:
        yield Coupling(
            "dropout", f"{name} ({kind}, dropout={module.dropout})", "its mask is not keyed", "use dropout=0"
        )
    if (
        any(type(hook).__name__ == "SpectralNorm" for hook in module._forward_pre_hooks.values())
        or "SpectralNorm" in kind
    ):
        yield Coupling(
            "spectral norm",
            f"{name} ({kind})",
            "every training forward pass moves its power iteration",
            "freeze it, or normalise once a step outside the model",
        )


def _of_config(config: Any) -> list[Coupling]:
    found = [
        Coupling(
            "dropout",
            f"config.{name}={value}",
            "the model draws it inside its layers, for the micro-batch",
            f"set config.{name} = 0 before building the model",
        )
        for name, value in sorted(vars(config).items())
        if "drop" in name and "classifier" not in name and isinstance(value, float) and 0 < value < 1
    ]
    if getattr(config, "output_router_logits", False):
        found.append(
            Coupling(
                "expert balancing",
                "config.output_router_logits=True",
                "its loss is an average over whatever shares a micro-batch",
                "set output_router_logits=False",
            )
        )
    return found
