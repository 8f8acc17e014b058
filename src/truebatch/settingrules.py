"""Rules that settings are checked by where they are made: a number inside limits, a word that is known."""

from __future__ import annotations

import math
from typing import Any, get_args

from truebatch.errors import ConfigError
from truebatch.textfiles import nearest


def check_range(
    config: Any, *names: str, above: float = -math.inf, below: float = math.inf, most: float = math.inf
) -> None:
    """Numbers are finite, 0 or more, and inside the given limits."""
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


def check_choice(config: Any, name: str, choices: Any) -> None:
    """The value is one of the choices, a `Literal`; else the nearest one is named."""
    value = getattr(config, name)
    if value not in get_args(choices):
        raise ConfigError(
            f"{name} is not known{nearest(str(value), list(get_args(choices)))}",
            seen=f"{name}={value!r}",
            do=f"use one of: {', '.join(get_args(choices))}",
        )
