"""Which layers fit together: every pair of cuts by the residual of its least-squares map, and by the loss it gives.

tokens -> residual streams of both donors at every depth -> residual of every pair (k, j) -> perplexity of the best ones
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truebatch.io.atomic_files import write_json, write_text
from truebatch.reports.plots import heat_map
from truebatch_systems.stitched_llm.data.retokenize import Spelling
from truebatch_systems.stitched_llm.eval.evaluate import perplexity
from truebatch_systems.stitched_llm.model.donors import Donor, keep_bottom
from truebatch_systems.stitched_llm.model.respell import Respelling, first_cells
from truebatch_systems.stitched_llm.model.stitch import Cut, Rows, fit_start, ids_above, stitch

_SMALLEST = 1e-12
"""Directions of a stream below this share of its largest variance are left out of its basis."""


@dataclass(frozen=True, slots=True)
class CutPair:
    """One pair of cuts."""

    cut_bottom: int
    cut_top: int
    residual: float
    """Of the least-squares map: 0 is perfect, 1 is no better than a constant."""
    perplexity: float | None = None
    """Of the stitched model with that map, on held-out text."""


@dataclass(frozen=True, slots=True, eq=False)
class TwoVocabularies:
    """How both donors read the same ids; with neither, they have one vocabulary."""

    vocabulary: Tensor | None = None
    """[ids of the bottom donor] the id of the same token in the top one, -1 for none."""
    spelling: Spelling | None = None
    """Ids are the top donor's, and this says how the bottom one spells them."""


Streams = tuple[list[Tensor], list[Tensor]]
"""[tokens, width] after every layer of the bottom and of the top donor, the embedding first: the same tokens, in fp32."""


@torch.no_grad()
def paired_streams(bottom: Donor, top: Donor, rows: Iterable[Rows], between: TwoVocabularies) -> Streams:
    """What both donors make of the same tokens, those left out that the top donor cannot read as the bottom one does."""
    lower, upper = keep_bottom(bottom.model, bottom.depth), keep_bottom(top.model, top.depth)
    respelling = None if between.spelling is None else Respelling.of(between.spelling)
    found: Streams = ([], [])
    for ids, is_real in rows:
        other, is_kept = ids_above(ids, is_real.bool(), between.vocabulary)
        if respelling is None:
            below = [hidden[is_kept] for hidden in _hidden_states(lower, ids, is_real)]
        else:
            own = respelling.spelled(ids[is_kept], first_cells(is_kept, None)[is_kept])
            below = [hidden[own.sample, own.last] for hidden in _hidden_states(lower, own.ids, own.is_real.long())]
        above = [hidden[is_kept] for hidden in _hidden_states(upper, other, is_real)]
        for parts, new in zip(found, (below, above), strict=True):
            parts[:] = [torch.cat(both) for both in zip(parts, new, strict=True)] if parts else new
    return found


def _hidden_states(base: Any, ids: Tensor, is_real: Tensor) -> list[Tensor]:
    out = base(input_ids=ids, attention_mask=is_real, output_hidden_states=True, use_cache=False)
    return [hidden.float() for hidden in out.hidden_states]


def pair_residuals(below: Sequence[Tensor], above: Sequence[Tensor]) -> list[CutPair]:
    """The residual of every pair: k layers kept below (1 and more), the top begun at layer j (0 to its last)."""
    targets = [_centred(y) for y in above[:-1]]
    pairs = []
    for k, x in enumerate(below[1:], 1):
        basis = _basis(_centred(x))
        for j, y in enumerate(targets):
            explained, total = float((basis.T @ y).square().sum()), float(y.square().sum())
            pairs.append(CutPair(k, j, (max(total - explained, 0.0) / total) ** 0.5))
    return pairs


def _centred(values: Tensor) -> Tensor:
    wide = values.double()
    return wide - wide.mean(0)


def _basis(x: Tensor) -> Tensor:
    """[n, r]: orthonormal columns that span the stream."""
    values, vectors = torch.linalg.eigh(x.T @ x)
    kept = values > _SMALLEST * values[-1]
    found: Tensor = x @ (vectors[:, kept] / values[kept].sqrt())
    return found


def search_cuts(
    bottom: Donor, top: Donor, rows: Sequence[Rows], held_out: Any, *, shape: Cut, measured: int | None = None,
    between: TwoVocabularies | None = None,
) -> list[CutPair]:  # fmt: skip
    """Every pair of cuts, best first: by perplexity where it was measured (the `measured` best by residual), then by residual.

    `shape` says which adapter joins them; its own cuts do not matter.
    """
    between = between or TwoVocabularies()
    pairs = sorted(pair_residuals(*paired_streams(bottom, top, rows, between)), key=lambda pair: pair.residual)
    number = len(pairs) if measured is None else measured
    tried = [_with_perplexity(pair, bottom, top, rows, held_out, shape, between) for pair in pairs[:number]]
    return [*sorted(tried, key=lambda pair: pair.perplexity or 0.0), *pairs[number:]]


def _with_perplexity(
    pair: CutPair, bottom: Donor, top: Donor, rows: Sequence[Rows], held_out: Any, shape: Cut, between: TwoVocabularies
) -> CutPair:
    cut = replace(shape, bottom=pair.cut_bottom, top=pair.cut_top)
    model = stitch(bottom, top, cut, vocabulary=between.vocabulary, spelling=between.spelling, with_hashes=False)
    fit_start(model, top.model, cut, rows)
    return replace(pair, perplexity=perplexity(model, held_out))


def write_search(pairs: Sequence[CutPair], out: Path) -> list[Path]:
    """`search.json` and a heat map of each measure; the files."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "search.json", [asdict(pair) for pair in pairs])
    files = [out / "search.json", out / "residual.svg"]
    write_text(files[1], _picture(pairs, "residual"))
    if any(pair.perplexity is not None for pair in pairs):
        files.append(out / "perplexity.svg")
        write_text(files[2], _picture(pairs, "perplexity"))
    return files


def _picture(pairs: Sequence[CutPair], measure: str) -> str:
    rows, columns = sorted({p.cut_bottom for p in pairs}), sorted({p.cut_top for p in pairs})
    known = {(p.cut_bottom, p.cut_top): getattr(p, measure) for p in pairs}
    values = [[known[k, j] if known[k, j] is not None else float("nan") for j in columns] for k in rows]
    return heat_map(
        values,
        title=f"{measure} of every pair of cuts",
        rows=[str(k) for k in rows],
        columns=[str(j) for j in columns],
        names=("first layer of the top donor", "layers kept of the bottom donor"),
    )
