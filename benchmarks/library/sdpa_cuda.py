"""How far the attention kernels of a GPU are from fp64, length by length: output and gradients of one layer in bf16.

    python -m benchmarks sdpa_cuda --json sdpa_cuda.json
    python -m benchmarks sdpa_cuda --device cpu     (a dry run with the kernels of a CPU)

Query heads share key heads, as in models of today. Gives the worst length of each kernel; then each kernel with gradients
of the output that have once the layout of the output and once another: a kernel that is planned for the first must not
serve the second. Exits with 1 where one is further off than bf16 explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.benchmark import Benchmark, Row, option

HEADS, KEY_HEADS, WIDTH = 32, 4, 64
LENGTHS = (
    *range(1, 34), 47, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300, 511, 513, 777, 1024, 1025, 1300, 1537, 1800,
    2047, 2049, 2500, 3001, 4095, 4096,
)  # fmt: skip
LAYOUT_LENGTHS = (83, 342, 1001)
"""For which no kernel was planned before."""
LIMIT = 0.02
"""A relative distance that bf16 explains: it has eight bits, and errors add up."""
KERNELS, LAYOUTS = CASES = ("kernels", "layouts")
BACKENDS = {
    "default": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaOptions:
    """What is measured."""

    device: str = option("cuda", "cuda, or cpu: a dry run with the kernels of a CPU.")
    heads: int = HEADS
    key_heads: int = KEY_HEADS
    width: int = WIDTH


def results(parts: list[Tensor], weight: Tensor, backend: SDPBackend | None) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    leaves = [part.detach().requires_grad_() for part in parts]
    with nullcontext() if backend is None else sdpa_kernel(backend):
        out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def distances(
    length: int, device: torch.device, backend: SDPBackend | None, *, heads_first: bool = False
) -> list[float]:
    """Of each result, relative to fp64."""
    chance = torch.Generator().manual_seed(length)
    # The layout that projections give: [1, length, heads, width], transposed.
    shapes = [(1, length, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    made = [torch.randn(s, generator=chance).to(device, torch.bfloat16).transpose(1, 2) for s in shapes]
    found = results(made[:3], made[3].contiguous() if heads_first else made[3], backend)
    wanted = results([part.double() for part in made[:3]], made[3].double(), SDPBackend.MATH)
    least = 1e-2 * float(wanted[3].norm())  # where a gradient is zero (a sample of one token), noise is no error
    return [float((a.double() - b).norm()) / max(float(b.norm()), least) for a, b in zip(found, wanted, strict=True)]


def measure(prepared: tuple[SdpaOptions, str], method: str) -> Row:
    """One kernel at every length, or in both layouts of the gradient of the output."""
    options, case = prepared
    device, backend = torch.device(options.device), BACKENDS[method]
    figures = layouts(device, backend) if case == LAYOUTS else lengths(device, backend)
    return {"figures": figures, "cudnn": torch.backends.cudnn.version()}


def layouts(device: torch.device, backend: SDPBackend | None) -> dict[str, Any]:
    """The largest distance of a first gradient with the layout of the output, and of a second that is contiguous by heads."""
    try:
        return {
            str(length): [max(distances(length, device, backend, heads_first=is_second)) for is_second in (False, True)]
            for length in LAYOUT_LENGTHS
        }
    except RuntimeError as error:  # the kernel does not take these at all
        return {"refused": str(error)[:100]}


def lengths(device: torch.device, backend: SDPBackend | None) -> dict[str, Any]:
    """The length at which a kernel is furthest off, and those at which it is too far or refuses."""
    rows: dict[int, list[float]] = {}
    refused: dict[str, str] = {}
    for length in LENGTHS:
        try:
            rows[length] = distances(length, device, backend)
        except RuntimeError as error:
            refused[str(length)] = str(error)[:100]
    if not rows:
        return {"refused": refused}
    far = [length for length, row in rows.items() if not all(value <= LIMIT for value in row)]
    worst = max(rows, key=lambda length: max(rows[length]))
    return {"worst length": worst, "its distances": rows[worst], "too far": far, "refused": refused}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of every kernel under its name, at all lengths and in both layouts."""
    found = {case: {row["method"]: row["figures"] for row in rows if row["case"] == case} for case in CASES}
    return {"cudnn": torch.backends.cudnn.version(), **found}


def problems(result: Mapping[str, Any]) -> list[str]:
    """Where a kernel is further off than bf16 explains."""
    lines = [
        f"{name}: too far at lengths {kernel['too far']}"
        for name, kernel in result[KERNELS].items()
        if kernel.get("too far")
    ]
    return lines + [
        f"{name}: too far at length {length} in one of two layouts: {row}"
        for name, kernel in result[LAYOUTS].items()
        for length, row in kernel.items()
        if length != "refused" and not all(value <= LIMIT for value in row)
    ]


BENCHMARK = Benchmark(
    name="sdpa_cuda",
    about=__doc__ or "",
    options=SdpaOptions,
    cases=lambda options: list(CASES),
    methods=lambda options: list(BACKENDS),
    measure=measure,
    summary=summary,
    problems=problems,
)
