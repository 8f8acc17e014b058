"""Operators of ours that compiled models may call.

`torch.library.custom_op` does the same and wraps every call in Python, which takes the host of a small model as long as
the operator itself: here nothing stands between torch's dispatcher and the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("truebatch", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define_operator(schema: str, run: Callable[..., Any], *, shapes: Callable[..., Any]) -> Any:
    """The operator of a schema, which changes no argument and returns none; `shapes` is what a compiler sees of it."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"truebatch::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.truebatch, name).default
