"""`attn_implementation="truebatch"`: the name is known once truebatch and transformers are both imported.

import truebatch -> watch_imports -> transformers.modeling_utils is imported, now or later -> register

Nothing heavy is imported here. The attention itself is imported when a model first chooses it: transformers is often
still in the middle of its own imports when the name is registered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

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
    models = sys.modules.get(_MODELS)
    if models is not None and hasattr(models, "AttentionInterface"):
        _register_in(models)
    elif not any(isinstance(finder, _ModelsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ModelsFinder())


class _ModelsFinder(MetaPathFinder):
    """Finds one module as the other finders do, and registers once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the models of transformers, None for everything else."""
        if fullname != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """The loader of another finder, and one call after it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # others ask it for source, resources and file names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute, leave the module with its own loader, register."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register_in(module)


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
