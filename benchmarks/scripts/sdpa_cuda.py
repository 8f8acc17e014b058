"""How far the attention kernels of a GPU are from fp64, length by length: output and gradients of one layer in bf16.

    python -m benchmarks sdpa_cuda --out sdpa_cuda.json
    python -m benchmarks sdpa_cuda --device cpu     (a dry run with the kernels of a CPU)

Query heads share key heads, as in models of today. Prints the worst length of each kernel. Then each kernel again with
gradients of the output that lie once as the output does and once head after head: a kernel that is planned for the first of
them must not be taken for the second. Exits with 1 where one is further off than bf16 explains.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import origin

HEADS, KEY_HEADS, WIDTH = 32, 4, 64
LENGTHS = (
    *range(1, 34), 47, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300, 511, 513, 777, 1024, 1025, 1300, 1537, 1800,
    2047, 2049, 2500, 3001, 4095, 4096,
)  # fmt: skip
LAYOUT_LENGTHS = (83, 342, 1001)
"""For which no kernel was planned before."""
LIMIT = 0.02
"""A relative distance that bf16 explains: it has eight bits, and errors add up."""
BACKENDS = {
    "default": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaConfig:
    """What is measured."""

    device: str
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


def layouts(device: torch.device, backend: SDPBackend | None) -> dict[str, list[float] | str]:
    """The largest distance of a first gradient that lies as the output does, and of a second that lies head after head."""
    try:
        return {
            str(length): [max(distances(length, device, backend, heads_first=is_second)) for is_second in (False, True)]
            for length in LAYOUT_LENGTHS
        }
    except RuntimeError as error:  # the kernel does not take these at all
        return {"refused": str(error)[:100]}


def main() -> int:
    """Every kernel at every length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    report: dict[str, Any] = {
        **origin(SdpaConfig(device=given.device), command=command_line("benchmarks.scripts.sdpa_cuda")),
        "cudnn": torch.backends.cudnn.version(),
        "kernels": {}, "layouts": {},
    }  # fmt: skip
    for name, backend in BACKENDS.items():
        report["layouts"][name] = layouts(device, backend)
        print(name, "as the output lies, then head after head:", report["layouts"][name], flush=True)
        rows: dict[int, list[float]] = {}
        refused: dict[int, str] = {}
        for length in LENGTHS:
            try:
                rows[length] = distances(length, device, backend)
            except RuntimeError as error:
                refused[length] = str(error)[:100]
        if not rows:
            report["kernels"][name] = {"refused": refused}
            continue
        far = [length for length, row in rows.items() if not all(value <= LIMIT for value in row)]
        worst = max(rows, key=lambda length: max(rows[length]))
        report["kernels"][name] = {
            "worst length": worst,
            "its distances": rows[worst],
            "too far": far,
            "refused": refused,
        }
        print(name, report["kernels"][name], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    is_far = [bool(kernel.get("too far")) for kernel in report["kernels"].values()]
    is_far += [
        not all(value <= LIMIT for value in row) for kernel in report["layouts"].values() for row in kernel.values()
    ]
    return int(any(is_far))


if __name__ == "__main__":
    sys.exit(main())
