"""Is this machine ready? Each check ends in a plain verdict and, where something is missing, in what to do."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from truebatch.environment import describe_environment
from truebatch.io.atomic_files import write_text

Verdict = Literal["ok", "note", "failed"]
LEAST_FREE_BYTES = 2**30
AMPERE, HOPPER = (8, 0), (9, 0)


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the machine and its answer."""

    name: str
    verdict: Verdict
    words: str


def check_machine(folder: Path) -> tuple[Check, ...]:
    """Check versions, the accelerator, and that runs can be kept in `folder`."""
    accelerator = _accelerator()
    return (
        _python(),
        *_packages(),
        _numba(),
        accelerator,
        *_attention_plans(accelerator),
        *_attention_gradients(accelerator),
        _writing(folder),
        _locking(folder),
        _space(folder),
    )


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    is_new = sys.version_info >= (3, 11)
    return Check("python", "ok" if is_new else "failed", version if is_new else f"{version}; install 3.11 or newer")


def _packages() -> list[Check]:
    try:
        required = [line for line in metadata.requires("truebatch") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        words = "runs from a folder and was not installed: the versions that it needs are not known here"
        return [Check("truebatch", "note", words)]
    return [_package(line) for line in required]


def _package(requirement: str) -> Check:
    name = re.split(r"[<>=!~\s;\[]", requirement, maxsplit=1)[0]
    bound = re.search(r">=\s*([0-9.]+)", requirement)
    least = bound[1] if bound else "0"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "failed", f"not installed; pip install '{name}>={least}'")
    if _numbers(version) < _numbers(least):
        return Check(name, "failed", f"{version} is too old; pip install '{name}>={least}'")
    return Check(name, "ok", version)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _numba() -> Check:
    try:
        return Check("numba", "ok", metadata.version("numba"))
    except metadata.PackageNotFoundError:
        return Check("numba", "note", "not installed: planning works, but slower; pip install 'truebatch[fast]'")


def _accelerator() -> Check:
    words = str(describe_environment()["accelerator"])
    return Check("accelerator", "failed" if "cannot be imported" in words else "ok", words)


def _attention_plans(accelerator: Check) -> list[Check]:
    """On a GPU whose fastest kernel for packed rows needs a package: whether it is there."""
    if not accelerator.words[:1].isdigit():
        return []
    import torch  # it was imported to name the GPU

    if torch.version.cuda is None or torch.cuda.get_device_capability() < HOPPER:
        return []
    name = "nvidia-cudnn-frontend"
    try:
        return [Check(name, "ok", metadata.version(name))]
    except metadata.PackageNotFoundError:
        words = (
            "not installed: packed rows take torch's own attention, slower on this GPU; pip install 'truebatch[cudnn]'"
        )
        return [Check(name, "note", words)]


def _attention_gradients(accelerator: Check) -> list[Check]:
    """On a GPU: whether torch's attention is one whose gradients depend on what ran before."""
    if not accelerator.words[:1].isdigit():
        return []
    import torch

    if torch.version.cuda is None or torch.cuda.get_device_capability() < AMPERE:
        return []
    scores = importlib.import_module("truebatch.attention.score_rule")  # with torch, which may be missing
    try:
        is_confused = scores.plans_confuse_layouts(torch.device("cuda"))
    except RuntimeError as error:  # no memory left on the GPU, say
        return [Check("attention", "note", f"could not be tried: {str(error)[:200]}")]
    if not is_confused:
        return [Check("attention", "ok", "gradients do not depend on the memory layout of the output's gradient")]
    words = (
        "cuDNN's attention in this torch gives wrong gradients when their layout changes: truebatch trains without it; "
        "in a loop of your own, call torch.backends.cuda.enable_cudnn_sdp(False)"
    )
    return [Check("attention", "note", words)]


def _writing(folder: Path) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".truebatch-") as place:
            write_text(Path(place) / "测试 file.txt", "written, synced and renamed")
    except OSError as error:
        return Check("writing", "failed", f"{error}; choose a folder that can be written")
    return Check("writing", "ok", f"files can be written, synced and renamed in {folder}")


def _locking(folder: Path) -> Check:
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".truebatch-") as place:
            first, second = (FileLock(Path(place) / "lock", timeout=0, thread_local=False) for _ in range(2))
            with first:
                try:
                    with second:
                        return Check("locking", "failed", "two owners at once; keep runs on a local filesystem")
                except Timeout:
                    return Check("locking", "ok", "a run folder has one owner at a time")
    except OSError as error:
        return Check("locking", "failed", f"{error}; keep runs on a filesystem with locks")


def _space(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("space", "failed", str(error))
    words = f"{free / 2**30:.1f} GiB free in {folder}"
    return Check("space", "ok", words) if free >= LEAST_FREE_BYTES else Check("space", "note", f"only {words}")
