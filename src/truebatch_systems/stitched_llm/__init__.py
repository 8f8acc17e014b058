"""Layers of two donor language models joined by a trained adapter, at any batch size.

Names are imported on first use, so that naming the system never waits for transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME: dict[str, str] = {
    "STITCHED_LLM": "system",
    "StitchedForCausalLM": "model.model",
    "StitchedModel": "compat",
    "load_stitched": "model.save_load",
    "save_adapter": "model.save_load",
    "stitch": "model.stitch",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"truebatch_systems.stitched_llm has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
