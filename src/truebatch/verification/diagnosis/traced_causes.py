"""From the operation that was traced to the cause: what kind it is, along which axis it works, what it takes in."""

from __future__ import annotations

from collections.abc import Callable

from truebatch.verification.diagnosis.trace.culprit import NEIGHBOURS, NUMBER, ORDER, PADDING, WIDTH, Culprit
from truebatch.verification.diagnosis.trace.op_kinds import (
    ARITHMETIC,
    ATTENTION,
    CASTS,
    CONVOLUTION,
    COUNTED,
    INDEXED,
    MOVED,
    NORMALISED,
    PICKED,
    PRODUCTS,
    RANDOM,
    RANKED,
    RECURRENT,
    REDUCED,
    RUNNING,
    TABLES,
    TRANSFORMED,
    VIEWS,
    WEIGHED,
)  # fmt: skip
from truebatch.verification.diagnosis.trace.op_trace import Suspect
from truebatch.verification.diagnosis.trace.sample_parts import CELLS, ENTRIES, FLAT, ROW
from truebatch.verification.report import Cause

MIXED = "samples are mixed"


def cause_of(culprit: Culprit) -> Cause:
    """The cause, by the first rule that knows this kind of operation; otherwise where to look."""
    return next((cause for rule in _RULES if (cause := rule(culprit)) is not None), _unknown(culprit))


def where(suspect: Suspect) -> str:
    """`cumsum` in 'layers.0' (model.py:41)."""
    operation = suspect.operation
    place = f"'{operation.module}'" if operation.module else _SELF
    return f"`{operation.name}` in {place} ({operation.source})"


_SELF = "the model itself"


def axes_worked(suspect: Suspect) -> set[str]:
    """Kinds of the axes that an operation works along: those it names, or those that its result has not."""
    if not suspect.inputs:
        return set()
    first = suspect.inputs[0]
    named = {first[dim] for dim in suspect.dims if -len(first) <= dim < len(first)}
    if named or suspect.output is None:
        return named
    return {kind for kind in set(first) if first.count(kind) > suspect.output.count(kind)}


def _all_kinds(suspect: Suspect) -> set[str]:
    return {kind for kinds in suspect.inputs for kind in kinds}


def _is(suspect: Suspect, known: frozenset[str] | tuple[str, ...]) -> bool:
    name = suspect.operation.name
    return name in known if isinstance(known, frozenset) else any(part in name for part in known)


def _blamed(c: Culprit) -> Suspect:
    """The operation itself; or where it only hands on what an earlier one made, that one.

    A result whose cells cannot be told (its length is not that of the row) differs as soon as somebody looks at it.
    """
    own = c.suspect
    if own.origin is None or not (_is(own, MOVED) or _is(own, VIEWS)):
        return own
    lost = [s for s in own.chain[1:] if s.output is None]
    return next((s for s in lost if _is(s, RECURRENT) or _is(s, CONVOLUTION) or _is(s, ATTENTION)), own)


def _root(c: Culprit) -> Suspect:
    """Where the whole numbers or markers that differ were made."""
    return c.suspect.chain[-1]


def _from(c: Culprit) -> str:
    """`index_add` in 'x' (file), by what `argsort` (file) gives."""
    root = _root(c)
    return where(c.suspect) + (
        f", by what `{root.operation.name}` ({root.operation.source}) gives," if root is not c.suspect else ""
    )


def _another_path(c: Culprit) -> Cause | None:
    extra = c.suspect.extra
    if extra is None or extra.is_ours or _is(c.suspect, ATTENTION):
        return None
    if NEIGHBOURS in c.effects and c.layout != "packed" and (extra.name in REDUCED or extra.name in RANKED):
        return _mixing(c, f"`{extra.name}` ({extra.source}), which does not run for a sample alone,")
    if c.effects & {NEIGHBOURS, PADDING}:
        return None
    if extra.name in CASTS:
        return Cause(
            "computed in another precision",
            f"`{extra.name}` ({extra.source}) runs in a micro-batch but not for a sample alone, so rounding differs",
            "use one dtype for any number of samples",
        )
    return Cause(
        "a different code path in a micro-batch",
        f"`{extra.name}` ({extra.source}) runs in a micro-batch but not for a sample alone: the code branches on the number of "
        "samples or on padding",
        "use the same code for one sample and for several",
    )


def _random(c: Culprit) -> Cause | None:
    root = _root(c)
    if not RANDOM.fullmatch(root.operation.name):
        return None
    return Cause(
        "randomness is not keyed by sample",
        f"{where(root)} draws its numbers for the whole micro-batch: which of them a sample gets depends on its place",
        "draw them with a key for each sample (truebatch.batch.keyed_random), or leave them out",
    )


def _row_zero(c: Culprit) -> Cause | None:
    """One row is picked out of several: the axis of rows is gone, though there are several rows."""
    picked = next((s for s in c.suspect.chain if _takes_one_row(s)), None)
    if picked is None or c.layout == "packed":
        return None
    return Cause(
        "row 0 stands for the whole micro-batch",
        f"{where(picked)} takes one row of the micro-batch, and sample {c.sample}, which lies in another row, is computed "
        "with it",
        "compute spans, lengths and positions for every row, as boolean tensors [B, T]; look for an index [0] or [:1]",
    )


def _takes_one_row(suspect: Suspect) -> bool:
    if not _is(suspect, PICKED) or suspect.output is None or len(suspect.inputs) != 1:
        return False
    return ROW in suspect.inputs[0] and ROW not in suspect.output


def _mixed(c: Culprit) -> Cause | None:
    """Samples in other rows have a say."""
    suspect, root = c.suspect, _root(c)
    is_over_rows = bool({ROW, FLAT, ENTRIES} & axes_worked(suspect)) and not _is(suspect, PICKED)
    is_ranked = _is(root, RANKED) and bool({ROW, FLAT, ENTRIES} & _worked_or_all(root))
    if c.layout == "packed" or not (is_over_rows or is_ranked or NEIGHBOURS in c.effects):
        return None
    return _mixing(c, _from(c))


def _indexed(c: Culprit) -> Cause | None:
    """Entries of flat fields that are read or written by index: edges of a graph, parents in a tree, owners."""
    suspect = c.suspect
    kinds = _all_kinds(suspect) | set(suspect.output or ())
    if suspect.operation.name not in INDEXED or ENTRIES not in kinds or _is(_root(c), RANKED):
        return None
    return Cause(
        "indices point into other samples",
        f"{where(suspect)} reads or writes entries by index, and some indices of sample {c.sample} lead to entries of other "
        "samples",
        "indices of a sample count from 0: add where its entries begin, batch.flat(axis).starts[owner]",
    )


def _mixing(c: Culprit, what: str) -> Cause:
    return Cause(
        MIXED,
        f"{what} combines several rows: sample {c.sample} changes with the samples beside it (a statistic, a ranking, the "
        "capacity of experts, negatives from the batch)",
        "compute it for every sample alone, freeze it, or declare the samples that belong together one sample",
    )


def _worked_or_all(suspect: Suspect) -> set[str]:
    return axes_worked(suspect) or _all_kinds(suspect)


def _positions(c: Culprit) -> Cause | None:
    """Whole numbers that differ, and are counted or calculated: positions."""
    root = _root(c)
    is_counted = _is(root, COUNTED) and root.output not in ((ROW,), ())
    if root is c.suspect and not (is_counted and not root.inputs):
        return None
    is_vector = root.output == (CELLS,) and not _is(root, RANKED)  # no axis of rows: it is not made of tokens
    is_calculated = (is_vector or _is(root, ARITHMETIC)) and bool(root.output) and _is(c.suspect, TABLES)
    if not (is_counted or is_calculated):
        return None
    name, words = _POSITIONS.get(c.layout, _POSITIONS["right"])
    return Cause(
        name,
        f"{where(root)} computes the positions of a sample, and {words}",
        "count positions from each sample's own first token (batch.positions, which begin at 0), and pass them as position_ids",
    )


_POSITIONS = {
    "packed": ("positions do not restart", "they continue over the row instead of restarting in every sample"),
    "left": ("positions counted from padding", "they count from the start of the row, and padding comes first"),
    "right": ("positions depend on the row", "they change with the width of the row or with its padding"),
}


def _attention(c: Culprit) -> Cause | None:
    suspect = c.suspect
    cells = 0 if suspect.output is None else suspect.output.count(CELLS)
    is_scores = suspect.operation.name in ("softmax", "log_softmax") and CELLS in axes_worked(suspect)
    is_product = suspect.operation.name in PRODUCTS and cells <= 1 and CELLS in _all_kinds(suspect)
    if not (_is(suspect, ATTENTION) or (is_scores and cells > 1) or is_product):
        return None
    place = _with_others(c)
    if c.layout == "packed":
        return Cause(
            "packed samples see each other",
            f"{place} reaches over the border between two samples of a packed row",
            "pass batch.segments to truebatch.attention.api.attend, or restarting positions to a model that uses them",
        )
    return Cause(
        "attention mask ignored",
        f"{place} attends to padding: it has no mask, or one that does not hide all of the padding",
        "pass is_real to attention (attention_mask for Hugging Face models), for every layer",
    )


def _with_others(c: Culprit) -> str:
    """The operation, and the other modules in which it does the same."""
    operation = c.suspect.operation
    if not c.others:
        return where(c.suspect)
    place, others = f"'{operation.module}'" if operation.module else _SELF, ", ".join(c.others[:3])
    return f"`{operation.name}` in {place} ({operation.source}) and in {others}"


def _state(c: Culprit) -> Cause | None:
    suspect = _blamed(c)
    is_kind = suspect.loops or _is(suspect, RECURRENT) or _is(suspect, CONVOLUTION)
    if not is_kind or "adaptive" in suspect.operation.name:
        return None
    if c.layout == "right":
        return Cause(
            "state runs over padding",
            f"{where(suspect)} reads padding as if it were data",
            "pack sequences for recurrent modules, zero the padding before convolutions, or use groups of equal length",
        )
    return Cause(
        "state runs across packed samples",
        f"{where(suspect)} carries what lies before a sample in its row (padding, another sample) into it",
        "do not pack this model or pad it on the left; use right padding or groups of equal length (choose_layout)",
    )


def _statistics(c: Culprit) -> Cause | None:
    suspect = c.suspect
    if not _is(suspect, NORMALISED):
        return None
    if "softmax" in suspect.operation.name:
        return Cause(
            "attention mask ignored",
            f"{where(suspect)} weighs all cells of a row, padding and neighbours included, as a pooling by attention does",
            "set the scores of all cells but the sample's own to -inf first: scores.masked_fill(~is_real, -inf)",
        )
    return Cause(
        "statistics over the row",
        f"{where(suspect)} normalises over the cells of a row, padding and neighbours included",
        "normalise over the channels of each cell (LayerNorm, RMSNorm), or over each sample's own cells",
    )


def _running(c: Culprit) -> Cause | None:
    if not _is(c.suspect, RUNNING):
        return None
    return Cause(
        "a running sum over the row",
        f"{where(c.suspect)} continues through padding or across the border between two samples",
        "restart it in every sample, or use right padding or groups of equal length (choose_layout)",
    )


def _ranked(c: Culprit) -> Cause | None:
    root = _root(c)
    if not _is(root, RANKED):
        return None
    if not c.effects & {NEIGHBOURS, PADDING}:
        return Cause(
            "ties are broken by the row",
            f"{where(root)} chooses among scores that are equal, and which of them it takes depends on the shape of the row",
            "break ties by position (a stable sort, or a tiny term that decreases with the position), or accept one of them",
        )
    return Cause(
        "cells are ranked over the row",
        f"{where(root)} ranks padding or neighbours among the cells of a sample",
        "mask all cells but the sample's own with -inf first, or rank each sample by itself",
    )


def _transformed(c: Culprit) -> Cause | None:
    suspect = c.suspect
    is_weighed = _is(suspect, WEIGHED) and CELLS in suspect.inputs[0][-1:] if suspect.inputs else False
    if not (_is(suspect, TRANSFORMED) or is_weighed):
        return None
    return Cause(
        "the whole row is transformed",
        f"{where(suspect)} transforms the row as a whole, so the result depends on its width and on every cell in it",
        "use groups of equal length (choose_layout), or transform each sample by itself",
    )


def _picked(c: Culprit) -> Cause | None:
    """A cell is picked by its place in the row, and the axis of cells is gone."""
    suspect = c.suspect
    lost = CELLS in _all_kinds(suspect) and CELLS not in (suspect.output or ())
    if suspect.operation.name not in PICKED or not lost:
        return None
    if c.layout == "left":
        return Cause(
            "the first cell of a row is read",
            f"{where(suspect)} picks a cell by its index in the row; with padding on the left that is padding",
            "take each sample's own first token, or pad on the right",
        )
    return Cause(
        "the last cell of a row is read",
        f"{where(suspect)} picks a cell by its index in the row, and that cell is padding or belongs to another sample",
        "pad on the left for generation; otherwise take each sample's own last token",
    )


def _moved(c: Culprit) -> Cause | None:
    root = _root(c)
    moving = next((s for s in (c.suspect, root) if _is(s, MOVED) and CELLS in (s.output or ())), None)
    if moving is None and not _is(c.suspect, MOVED):
        return None
    return Cause(
        "cells move along the row",
        f"{where(moving or c.suspect)} moves cells along the row, so that padding or another sample's cells end up in a sample",
        "shift within each sample, and mask what comes in from outside (batch.positions == 0 marks first tokens)",
    )


def _reduced(c: Culprit) -> Cause | None:
    suspect = c.suspect
    is_lost = CELLS in axes_worked(suspect) or (CELLS in _all_kinds(suspect) and CELLS not in (suspect.output or ()))
    if not (_is(suspect, REDUCED) or "adaptive" in suspect.operation.name) or not is_lost:
        return None
    return Cause(
        "a mean over padding",
        f"{where(suspect)} reduces over all cells of a row, so padding is included or counted",
        "sum over real cells and divide by their number: (x * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True)",
    )


def _width(c: Culprit) -> Cause | None:
    """Numbers that differ, or the shape of the micro-batch alone, whatever is in it."""
    root = _root(c)
    if NUMBER in c.effects or (ORDER in c.effects and WIDTH not in c.effects):
        return Cause(
            "the result depends on the number of rows",
            f"{where(root)} changes with the number or the order of the rows",
            "compute with what belongs to the sample: its own length, its own id",
        )
    if not (WIDTH in c.effects or c.suspect.numbers or c.suspect.origin is not None):
        return None
    return Cause(
        "the result depends on the row width",
        f"{where(root)} computes with the width of the row or with the lengths of other samples",
        "compute with each sample's own length (batch.is_real.sum(1)), not with a shape or a longest length",
    )


def _unknown(c: Culprit) -> Cause:
    taken = [words for effect, words in _EFFECTS.items() if effect in c.effects]
    said = f"; it changes with {', '.join(taken)}" if taken else ""
    return Cause(
        "unknown",
        f"{where(c.suspect)} is the first operation whose result for sample {c.sample} differs although its inputs do "
        f"not{said}",
        "look at this line and at which cells other than the sample's own reach it",
    )


_EFFECTS = {
    NEIGHBOURS: "the content of other samples",
    PADDING: "the content of the padding",
    WIDTH: "the width of the row",
    ORDER: "the order of the samples",
    NUMBER: "the number of rows",
}
_RULES: tuple[Callable[[Culprit], Cause | None], ...] = (
    _random, _state, _another_path, _row_zero, _indexed, _mixed, _ranked, _picked, _positions, _attention, _running,
    _transformed, _moved, _statistics, _reduced, _width,
)  # fmt: skip
