"""The name `truebatch` among the models of lm-evaluation-harness, once both packages are imported. Nothing is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from truebatch.import_hooks import call_after_import

NAME = "truebatch"
CLASS = "truebatch.adapters.lm_eval:TruebatchLM"


def watch_imports() -> None:
    """Register now if lm-eval has its models already, else as soon as it has."""
    call_after_import("lm_eval.models", _register, ready="MODEL_MAPPING")


def _register(_models: Any) -> None:
    # An older lm-eval has a plain dict of classes: there the class is given to `simple_evaluate` as an object.
    registry = getattr(import_module("lm_eval.api.registry"), "model_registry", None)
    if registry is not None and NAME not in registry:
        registry.register(NAME, target=CLASS)
