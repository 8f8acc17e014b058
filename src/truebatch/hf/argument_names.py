"""Which arguments reach a model: those that its forward names, and those that it hands on to a module inside."""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn


def accepted_names(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of `forward`; `position_ids` too where it hands its `**kwargs` to a module that has them."""
    return frozenset(inspect.signature(model.forward).parameters) | handed_on(model)


def handed_on(model: nn.Module, depth: int = 3) -> frozenset[str]:
    """`position_ids`, where `forward` has no such argument and hands its `**kwargs` to a module that has."""
    rest = next((n for n, p in inspect.signature(model.forward).parameters.items() if p.kind is p.VAR_KEYWORD), "")
    if not rest or depth == 0:
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward))))
    except (OSError, TypeError, SyntaxError):  # code without a file
        return frozenset()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    handed = [c for c in calls if any(k.arg is None and ast.unparse(k.value) == rest for k in c.keywords)]
    modules = dict(model.named_modules())
    inner = [m for c in handed if (m := modules.get(ast.unparse(c.func).removeprefix("self."))) is not None]
    takes = any("position_ids" in inspect.signature(m.forward).parameters or handed_on(m, depth - 1) for m in inner)
    return frozenset({"position_ids"} if takes else ())
