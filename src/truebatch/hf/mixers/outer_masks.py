"""Vision-language models that hand their language model a mask of their own: cells of an image are seen both ways.

The segment table of the language model knows nothing of it, so such a model is packed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from truebatch.hf.mixers.trial_rows import alone_inputs, takes_types, trial_rows

LONG = 2
"""The number of a trial sample that is longer than the windows of tiny models."""
_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def makes_own_masks(
    model: nn.Module, part: nn.Module, attention: Callable[[Any], AbstractContextManager[None]]
) -> bool:
    """Whether `part`, the language model of `model`, gets a mask from it for a sample with an image.

    `attention` is opened while it is asked: a plain causal mask is none there. Asked once for each model.
    """
    found = _known.get(model)
    if found is None:
        found = _known[model] = takes_types(model) and _sees_mask(model, part, attention)
    return found


def _sees_mask(model: nn.Module, part: nn.Module, attention: Callable[[Any], AbstractContextManager[None]]) -> bool:
    if any(weight.is_meta for weight in model.parameters()):
        return False  # nothing can be tried
    rows = trial_rows(model)
    seen: list[bool] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_flatten((args, kwargs.get("attention_mask")))[0]
        seen.append(any(isinstance(leaf, Tensor) and leaf.ndim == 4 for leaf in leaves))

    if not rows.has_types:
        return False
    hook = part.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with attention(part), torch.no_grad():
            model(**alone_inputs(model, rows, LONG))
    finally:
        hook.remove()
    return any(seen)
