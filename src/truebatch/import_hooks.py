"""Call a function once a module of another package has been executed, now or later; nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Call = Callable[[Any], None]


def call_after_import(name: str, call: Call, *, ready: str = "__name__") -> None:
    """`call(module)` now if the module is there and has the attribute `ready`, else as soon as it is executed."""
    module = sys.modules.get(name)
    if module is not None and hasattr(module, ready):
        call(module)
    elif not any(isinstance(finder, OneModuleFinder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, OneModuleFinder(name, call))


class OneModuleFinder(MetaPathFinder):
    """Finds one module as the other finders do, and has a function called once it is executed."""

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of this module, None for everything else."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = CallingLoader(spec.loader, self.call)
        return spec


class CallingLoader(Loader):
    """The loader of another finder, and one call after it."""

    def __init__(self, loader: Loader, call: Call) -> None:
        self.loader, self.call = loader, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # others ask it for source, resources and file names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute, leave the module with its own loader, call."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.call(module)
