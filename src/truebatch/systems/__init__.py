"""Where the systems used to be. Exported models and scripts of users hold these names; each leads to `truebatch_systems`.

>>> from truebatch.systems.chinese_gpt.compat import BatchLoader
>>> BatchLoader.__module__.partition(".")[0]
'truebatch_systems'
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PREFIX = f"{__name__}."
_MOVED = {
    "stitched_llm.model": "stitched_llm.model.model",
    "stitched_llm.configuration": "stitched_llm.model.hf_config",
}
"""What the code beside a merged model imports."""


class _FormerNames(MetaPathFinder, Loader):
    """Imports `truebatch.systems.X` as `truebatch_systems.X`: the same module under two names, never a second copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX) or importlib.util.find_spec(_new_name(fullname)) is None:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_new_name(module.__name__))


def _new_name(name: str) -> str:
    old = name.removeprefix(_PREFIX)
    return f"truebatch_systems.{_MOVED.get(old, old)}"


sys.meta_path.insert(0, _FormerNames())
