"""The planning loops: one source, run by numba or by Python.

Written in the subset of Python that numba compiles and that also runs on plain lists, so both give the same plan.
Arrays are flat: `sizes[i * K + k]` is how much of resource k sample i uses, `limits[k]` how much a micro-batch may
hold. `PARTS` are called by loops, `KERNELS` by the rest of the package. numba caches compiled loops by the date of the
file the loop is in: after changing a part, touch the files of the loops that call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from truebatch.planning.loops import cut as cutting
from truebatch.planning.loops import cut_widths as widths
from truebatch.planning.loops import pack as packing


class Kernel(NamedTuple):
    """A loop and how many of its leading arrays it changes."""

    loop: Callable[..., int]
    results: int


PARTS = (
    packing.sort_part,
    packing.filler_key,
    *(packing.lowest, packing.add_free, packing.remove_free, packing.find_free, packing.has_room, packing.take),
    *(cutting.cut_run, cutting.split_costliest, cutting.share, cutting.choose, cutting.fill_ranks),
    *(cutting.deal, cutting.fill_whole),
    *(widths.row_width, widths.open_rows, widths.fill_rows, widths.cells_held, widths.close_empty),
)

KERNELS = {
    "bucket_order": Kernel(packing.bucket_order, 6),
    "copy_segments": Kernel(packing.copy_segments, 1),
    "count_lengths": Kernel(packing.count_lengths, 1),
    "sort_filler": Kernel(packing.sort_filler, 2),
    "add_costs": Kernel(packing.add_costs, 1),
    "counting_sort": Kernel(packing.counting_sort, 2),
    "best_fit": Kernel(packing.best_fit, 5),
    "cut_padded_steps": Kernel(cutting.cut_padded_steps, 4),
    "cut_packed_steps": Kernel(cutting.cut_packed_steps, 8),
    "cut_width_steps": Kernel(widths.cut_width_steps, 8),
    "deal_steps": Kernel(cutting.deal_steps, 2),
    "join_rows": Kernel(cutting.join_rows, 2),
}
