"""Custom operators that compiled models can call.

`torch.library.custom_op` does the same but wraps every call in Python, which takes as long as the operator itself for a
small model: here torch's dispatcher calls the function directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("truebatch", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define_operator(schema: str, run: Callable[..., Any], *, shapes: Callable[..., Any]) -> Any:
    """Register an operator that neither changes nor returns an argument; `shapes` is its fake implementation."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"truebatch::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.truebatch, name).default
