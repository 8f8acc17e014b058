"""What a model holds from one call to the next beside its weights: buffers, caches, counters, hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

State = Mapping[str, Any]
"""Name of what is held, as it would be written: `layers.0.cache`."""

_PLAIN = (int, float, str, bool, set, type(None))
"""What is compared by value; other objects (references to weights, say) are not looked into."""
_KEPT = (Tensor, list, tuple, dict, *_PLAIN)
_MODES = ("training", "dropout")
"""What the proof itself sets."""
_INTERNAL = ("hooks", "parameters", "buffers", "modules", "set")


def kept_state(model: nn.Module | None) -> dict[str, Any]:
    """Copies of everything that modules hold beside parameters and modules, as far as it is of a known kind."""
    found: dict[str, Any] = {}
    for path, holder, key in _places(model):
        value = holder[key]
        if isinstance(value, _KEPT):
            found[path] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
    return found


def changed_names(before: State, after: State) -> list[str]:
    """What is not what it was, or is new."""
    return [name for name, value in after.items() if name not in before or not _is_equal(before[name], value)]


@contextmanager
def forgotten(model: nn.Module, before: State) -> Iterator[Callable[[], None]]:
    """Calling what is yielded makes the model hold what it held before; afterwards it holds what it holds now."""
    now = kept_state(model)
    try:
        yield lambda: _put_back(model, before)
    finally:
        _put_back(model, now)


def _put_back(model: nn.Module, state: State) -> None:
    for path, holder, key in list(_places(model)):
        value = holder[key]
        if not isinstance(value, _KEPT):
            continue
        if path not in state:
            del holder[key]
        elif not _is_equal(value, state[path]):
            kept = state[path]
            holder[key] = kept.clone() if isinstance(kept, Tensor) else copy.copy(kept)


def _places(model: nn.Module | None) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Path, dictionary and key of everything a model holds beside parameters and modules."""
    for name, module in [] if model is None else list(model.named_modules()):
        own = vars(module)
        for holder in (own, own["_buffers"]):
            for key in list(holder):
                is_internal = key.startswith("_") and key.endswith(_INTERNAL)
                if holder is own and (is_internal or key in _MODES):
                    continue
                yield (f"{name}.{key}" if name else key), holder, key


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_is_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[k], b[k]) for k in a)
    is_plain = isinstance(a, _PLAIN) and isinstance(b, _PLAIN)
    return a == b if is_plain else isinstance(a, _PLAIN) == isinstance(b, _PLAIN)
