"""The language a person reads: TRUEBATCH_LANG if it is set, otherwise that of the locale; English or Chinese."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

Language = Literal["en", "zh"]
VARIABLE = "TRUEBATCH_LANG"
LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""In the order of POSIX: the first that is set counts."""


def language(environment: Mapping[str, str] | None = None) -> Language:
    """The language of messages; what is not known is English.

    >>> language({"LANG": "zh_CN.UTF-8"}), language({"LANG": "zh_CN.UTF-8", "TRUEBATCH_LANG": "en"})
    ('zh', 'en')
    """
    known = os.environ if environment is None else environment
    asked = known.get(VARIABLE, "").strip() or next((known[name] for name in LOCALES if known.get(name)), "")
    return "zh" if asked.lower().startswith("zh") else "en"


def unknown_language(environment: Mapping[str, str] | None = None) -> str | None:
    """What TRUEBATCH_LANG asks for, where it is neither English nor Chinese."""
    asked = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    return asked if asked and not asked.lower().startswith(("en", "zh")) else None
