"""Checks for settings: a number within limits, a value among choices."""

from __future__ import annotations

import math
from typing import Any, get_args

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest


def check_range(
    config: object, *names: str, above: float = -math.inf, below: float = math.inf, most: float = math.inf
) -> None:
    """Raise unless the values are finite, 0 or more, and within the given limits."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0 and above < value < below and value <= most):
            limits = {f"more than {above}": above, f"less than {below}": below, f"at most {most}": most}
            said = [words for words, limit in limits.items() if math.isfinite(limit)]
            raise ConfigError(
                f"{name} must be {', '.join(said) or 'a finite number of 0 or more'}",
                seen=f"{name}={value!r}",
                do=f"set {name} within these limits",
            )


def check_choice(config: object, name: str, choices: Any) -> None:
    """Raise unless the value is one of the choices of a `Literal`; the error names the nearest one."""
    value = getattr(config, name)
    if value not in get_args(choices):
        raise ConfigError(
            f"{name} is not known{nearest(str(value), list(get_args(choices)))}",
            seen=f"{name}={value!r}",
            do=f"use one of: {', '.join(get_args(choices))}",
        )
