"""What an operation was given: its tensors, its numbers, and the axes that it is to work along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from flat(part)
    elif isinstance(value, Mapping):
        yield from flat(list(value.values()))
    else:
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    return [t for t in flat(value) if isinstance(t, Tensor)]


def shapes_in(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))


def numbers_in(args: Any, kwargs: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in flat((args, kwargs)) if isinstance(v, int | float) and not isinstance(v, bool))


_SECOND = frozenset({"mean", "sum", "amax", "amin", "max", "min", "logsumexp", "prod", "nanmean", "nansum", "any", "all",
                     "argmax", "argmin", "std", "var", "var_mean", "std_mean", "softmax", "log_softmax", "cumsum", "cumprod",
                     "cummax", "cummin", "logcumsumexp", "flip", "select", "narrow", "gather", "index_select", "sort",
                     "argsort", "median", "nanmedian", "cat", "concat", "stack", "index_add", "scatter_add", "unbind",
                     "scatter", "count_nonzero", "fft", "softmin"})  # fmt: skip
"""Functions whose second argument is an axis, or several."""
_THIRD = frozenset({"roll", "topk", "kthvalue", "quantile", "normalize", "norm", "renorm", "split", "chunk"})


def named_dims(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The axes along which an operation works, as far as its arguments say."""
    place = 1 if name in _SECOND else 2 if name in _THIRD else None
    given = kwargs.get("dim", kwargs.get("axis", kwargs.get("dims")))
    if given is None and place is not None and len(args) > place:
        given = args[place:] if name == "flip" and isinstance(args[place], int) else args[place]
    if name == "layer_norm" and len(args) > 1 and isinstance(args[1], list | tuple):
        return tuple(range(-len(args[1]), 0))
    many = given if isinstance(given, list | tuple) else [given]
    return tuple(v for v in many if isinstance(v, int) and not isinstance(v, bool))
