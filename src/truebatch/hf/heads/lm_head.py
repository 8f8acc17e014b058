"""The last linear layer of a language model, taken out of its forward pass so that its logits are made in chunks.

model -> find_output_layer -> probed once against the model's own logits -> hidden states -> loss in chunks
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from truebatch.batch.chunked_cross_entropy import LogitRule
from truebatch.batch.torch_compile import force_eager
from truebatch.training.memory.oom import is_out_of_memory

_LOG = logging.getLogger(__name__)
PROBED_CELLS = 8
_EXACT, _HALF = 1e-5, 3e-2
"""How far the probe may be from the model's logits, as a share of the largest, by precision."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputLayer:
    """A linear layer whose output, under a rule, is all that a model's logits are."""

    linear: nn.Linear
    rule: LogitRule

    def logits(self, hidden: Tensor) -> Tensor:
        """What the model would give for these hidden states, in fp32."""
        weight, bias = self.linear.weight, self.linear.bias
        found = functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        found = found * self.rule.scale
        cap = self.rule.softcap
        return found if cap is None else cap * torch.tanh(found / cap)


_known: WeakKeyDictionary[nn.Module, OutputLayer | None] = WeakKeyDictionary()


def output_layer_of(
    model: nn.Module, input_ids: Tensor, *, image: int | None = None, targets: Tensor | None = None
) -> OutputLayer | None:
    """The output layer, if the model's logits are exactly what `OutputLayer` says; else None, and logits stay whole.

    The first call for a model runs it on a few cells of `input_ids` and compares; the answer is remembered. A token that
    stands for an `image` is replaced by a word, since there is none; a model that cannot do without keeps its logits whole.
    `targets`: what the decoder of an encoder-decoder is given.
    """
    if model not in _known:
        layer = find_output_layer(model)
        if layer is not None and isinstance(layer.linear.weight, FakeTensor):
            return layer  # shapes without values, for an estimate of memory: there is nothing to compare
        given = {"input_ids": input_ids} if targets is None else {"input_ids": input_ids, "decoder_input_ids": targets}
        given = {name: ids[:1, :PROBED_CELLS] for name, ids in given.items()}
        if image is not None:
            given = {name: ids.masked_fill(ids == image, 1 if image == 0 else 0) for name, ids in given.items()}
        _known[model] = layer if layer is not None and _is_all(model, layer, given) else None
    return _known[model]


def find_output_layer(model: nn.Module) -> OutputLayer | None:
    """A plain linear layer without hooks, and the rule its model's configuration names; None for anything else."""
    get: Any = getattr(model, "get_output_embeddings", lambda: None)
    linear = get()
    if type(linear) is not nn.Linear or _is_wrapped(linear):
        return None
    return OutputLayer(linear, logit_rule_of(model))


def _is_wrapped(linear: nn.Linear) -> bool:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    parametrized = hasattr(linear, "parametrizations") or "forward" in vars(linear)
    return any(hooks) or parametrized or hasattr(linear.weight, "full_tensor")


def logit_rule_of(model: Any) -> LogitRule:
    """What the configuration of a model says is done to its logits."""
    config = model.config.get_text_config()
    multiplied, divided = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    scale = float(multiplied) if multiplied is not None else 1.0 / float(divided) if divided is not None else 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitRule(scale=scale, softcap=None if cap is None else float(cap))


def _is_all(model: nn.Module, layer: OutputLayer, given: dict[str, Tensor]) -> bool:
    """Whether the rule turns what goes into the layer into the logits that come out of the model, and nothing else that is
    trained has a part in it: a bias that is added afterwards may be zero, and would never get a gradient."""
    linear, seen = layer.linear, list[tuple[Tensor, Tensor]]()
    # As written, not compiled once more for these few cells; with gradients even where an evaluation asks first.
    with _evaluating(model), torch.inference_mode(False), torch.enable_grad(), force_eager():
        given = {name: ids.clone() for name, ids in given.items()}
        hooks = [
            linear.register_forward_pre_hook(lambda _, taken: (taken[0].detach(), *taken[1:])),
            linear.register_forward_hook(lambda _, taken, out: seen.append((taken[0], out))),
        ]
        try:
            logits = model(**given, **({"use_cache": False} if _takes(model, "use_cache") else {})).logits
        except Exception as error:  # it wants more than a few words; if it is broken, its own forward pass will say so
            if is_out_of_memory(error):  # says nothing of the model
                raise
            _LOG.debug("%s wants more than words: its logits stay whole (%s)", type(model).__name__, error)
            return False
        finally:
            for hook in hooks:
                hook.remove()
        cells = given.get("decoder_input_ids", given["input_ids"])
        if len(seen) != 1 or seen[0][0].shape[:2] != cells.shape or logits.shape != seen[0][1].shape:
            return False
        others = [p for p in model.parameters() if p.requires_grad and p is not linear.weight and p is not linear.bias]
        if others and logits.requires_grad:
            grads = torch.autograd.grad(logits.sum(), others, allow_unused=True)
            if any(grad is not None for grad in grads):
                return False
    hidden, own = seen[0]
    wanted = logits.detach().float()
    limit = (_EXACT if own.dtype in (torch.float32, torch.float64) else _HALF) * wanted.abs().max()
    with torch.no_grad():
        return bool(((layer.logits(hidden) - wanted).abs().max() <= limit).item())


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in was_training:
            part.training = True


@contextmanager
def hidden_states_of(layer: OutputLayer) -> Iterator[list[Tensor]]:
    """While open, the layer keeps what it is given, in the list, and multiplies nothing: the model gives no logits."""
    seen: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[..., :1].clone()

    layer.linear.forward = keep  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        del layer.linear.forward
