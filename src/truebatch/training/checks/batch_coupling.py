"""What in a model would make its result depend on the cut, found before training begins.

The law holds where the objective is a sum over samples, a forward pass changes no buffer, randomness is keyed by sample
and no operation mixes samples. Everything else has a name here, and is refused unless allowed by that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
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
    is_keyed = getattr(model, "_truebatch_keyed", False)
    own = _of_config(config) if config is not None else []
    return found + [c for c in own if not (is_keyed and c.name == "dropout" and not leaves_out_layers(c.where))]


def leaves_out_layers(name: str) -> bool:
    """True for a rate by which whole layers, paths or tokens are left out: `key_dropout` does not know them."""
    return any(word in name for word in ("layerdrop", "layer_drop", "path", "token"))


def refuse_couplings(model: nn.Module, allow: Sequence[str], *, taken: Sequence[str] = ()) -> list[Coupling]:
    """Raise LawError for couplings that are not allowed by name; return those that are.

    `taken` are those that the objective takes over the whole step (`CoupledObjective.couplings`).
    """
    found = [c for c in find_couplings(model) if c.name not in taken]
    _refuse([c for c in found if c.name not in allow])
    return found


@contextmanager
def refused_if_seen(model: nn.Module, allow: Sequence[str], found: list[Coupling]) -> Iterator[None]:
    """Around the first step: couplings that only running shows are refused as well, or added to those `found`.

    Randomness drawn from the global generators (functional dropout, noise) and buffers that a forward pass changes.
    """
    before, versions = random_generators(model), _buffer_versions(model)
    yield
    is_drawn = any(not torch.equal(a, b) for a, b in zip(before, random_generators(model), strict=True))
    seen = [_DRAWN] if is_drawn and not any(c.name == "dropout" for c in found) else []
    changed = [name for name, version in _buffer_versions(model).items() if versions.get(name, version) != version]
    seen += [_changed_buffer(changed)] if changed else []
    _refuse([c for c in seen if c.name not in allow])
    found += [c for c in seen if c not in found]


_DRAWN = Coupling(
    "dropout",
    "the first step",
    "it drew random numbers from torch's global generator (functional dropout, noise), for the micro-batch",
    "call truebatch.key_dropout(model), or use noise keyed by sample",
)


def _changed_buffer(names: Sequence[str]) -> Coupling:
    return Coupling(
        "buffers",
        ", ".join(names[:3]),
        "a forward pass in training changes it, so it depends on how many forward passes a step is cut into",
        "change it once a step, outside the model, or freeze it",
    )


def random_generators(model: nn.Module) -> list[torch.Tensor]:
    """The states of torch's global generators on the devices of a model."""
    devices = {p.device for p in model.parameters() if p.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in sorted(devices, key=str))]


def _buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Saved buffers, but for those of modules that have a name of their own here."""
    known = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    saved = model.state_dict(keep_vars=True)
    return {
        name: (id(buffer), buffer._version)
        for name, buffer in model.named_buffers()
        if name in saved and name.rpartition(".")[0] not in known
    }


def _refuse(refused: Sequence[Coupling]) -> None:
    if refused:
        first = refused[0]
        names = sorted({c.name for c in refused})
        raise LawError(
            f"training would depend on how steps are cut: {', '.join(names)}",
            seen=f"{first.where}: {first.words}" + (f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""),
            do=f"{first.fix}; or allow it by name (allow={names}), and every log says 'equal in distribution'",
        )


def _of_module(name: str, module: nn.Module) -> Iterable[Coupling]:
    kind = type(module).__name__
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        yield Coupling(
            "dropout",
            f"{name} ({kind}, p={module.p})",
            "its mask is drawn for the micro-batch, not for the sample",
            "call truebatch.key_dropout(model), which draws it for the sample, or set p=0",
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
            f"call truebatch.key_dropout(model), which draws it for the sample, or set config.{name} = 0",
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
                "set output_router_logits=False; `train hf` takes it over the whole step for causal models",
            )
        )
    if getattr(config, "expert_capacity", None) is not None:
        found.append(
            Coupling(
                "expert capacity",
                f"config.expert_capacity={config.expert_capacity}",
                "tokens beyond it are left out of an expert, by what shares their micro-batch",
                "use a model whose experts take all tokens that choose them",
            )
        )
    return found
