"""What a bug report needs to know about a machine, without what it must not hold.

No user name, host name, home folder, key or token: variables are shown by an allow list, and what looks
like a secret or a path into a home folder is replaced even there.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "truebatch", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "numba", "pydantic",
    "typer", "rich", "PyYAML", "pyarrow", "pillow", "datasets", "triton", "flash-attn", "nvidia-cudnn-frontend", "deepspeed",
    "peft",
)  # fmt: skip
VARIABLES = re.compile(
    r"(TRUEBATCH|CUDA|NCCL|OMP|MKL|OPENBLAS|NUMBA|TORCH|PYTORCH|ACCELERATE|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE)(_\w+)?"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LANG|LC_ALL|PYTHONUTF8|PYTHONHASHSEED|NO_COLOR|COLUMNS|CI"
)
_SECRET_NAME = re.compile(r"(?i)token|secret|passw|key|credential|auth|cookie")
_SECRET_VALUE = re.compile(
    r"(?x) \b(hf|sk|ghp|gho|github_pat|glpat|xox[abp]|AKIA|eyJ)[-_A-Za-z0-9]{8,} | [A-Za-z0-9+/_-]{40,} | (?<=://)[^/@\s]+(?=@)"
)


def describe_environment() -> dict[str, Any]:
    """Versions, machine, accelerator and settings, as plain JSON values with secrets removed."""
    return {
        "truebatch": _version("truebatch"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": _cpus(),
        "memory_gib": _memory_gib(),
        "accelerator": _accelerator(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "variables": {name: redact(name, value) for name, value in sorted(os.environ.items()) if _is_shown(name)},
    }


def redact(name: str, value: str) -> str:
    """A variable's value without secrets and without the user's home folder."""
    if _SECRET_NAME.search(name):
        return "(removed)"
    value = value.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else value
    value = re.sub(r"(/home|/Users|/root)(/[^/:\s]+)?", "~", value)
    return _SECRET_VALUE.sub("(removed)", value)


def _is_shown(name: str) -> bool:
    return VARIABLES.fullmatch(name) is not None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _memory_gib() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return round(psutil.virtual_memory().total / 2**30, 1)


def _accelerator() -> str:
    if _version("torch") is None:
        return "torch is not installed"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {redact('', str(error))[:200]}"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        version = torch.version.cuda or torch.version.hip
        return f"{len(names)} x {names[0]} ({version})" if names else "CUDA without a device"
    if sys.platform == "darwin" and torch.backends.mps.is_available():
        return "Apple MPS"
    return "none (CPU)"
