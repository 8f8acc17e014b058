"""`attn_implementation="truebatch"`: the name is known once truebatch and transformers are both imported.

import truebatch -> watch_imports -> transformers.modeling_utils is imported, now or later -> register

Nothing heavy is imported here. The attention itself is imported when a model first chooses it: transformers is often
still in the middle of its own imports when the name is registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from truebatch.import_hooks import call_after_import

NAME = "truebatch"
"""The name under which transformers knows this attention."""

_MODELS = "transformers.modeling_utils"
_HOOKS = "truebatch.hf.attention.model_hooks"


def register() -> None:
    """Make `attn_implementation="truebatch"` known to transformers.

    `import truebatch` does so by itself, before or after transformers is imported. Call this where import hooks cannot
    work, for example in a frozen program. Calling it twice does no harm.

    >>> import truebatch as tb
    >>> tb.register()
    >>> from transformers import AttentionInterface
    >>> "truebatch" in AttentionInterface().valid_keys()
    True
    """
    _register_in(import_module(_MODELS))


def watch_imports() -> None:
    """Register now if transformers has its models loaded already, else as soon as it has."""
    call_after_import(_MODELS, _register_in, ready="AttentionInterface")


def _register_in(models: Any) -> None:
    if NAME in models.AttentionInterface().valid_keys():
        return
    models.AttentionInterface.register(NAME, _attention)
    import_module("transformers.masking_utils").AttentionMaskInterface.register(NAME, _mask)
    owner = models.PreTrainedModel
    owner.get_correct_attn_implementation = _following(owner.get_correct_attn_implementation)


def _following(choose: Callable[..., str]) -> Callable[..., str]:
    """transformers asks this method for every model that is made or given another attention."""

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, *args: Any, **options: Any) -> str:
        chosen = choose(self, *args, **options)
        if chosen == NAME or "_truebatch_hooks" in self.__dict__:
            chosen = import_module(_HOOKS).follow_choice(self, chosen)
        return chosen

    return get_correct_attn_implementation


def _attention(*args: Any, **options: Any) -> Any:
    return import_module("truebatch.hf.attention.packed").packed_attention(*args, **options)


def _mask(*args: Any, **options: Any) -> Any:
    return import_module("truebatch.hf.attention.packed").packed_mask(*args, **options)
