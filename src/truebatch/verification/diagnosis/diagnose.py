"""From what was seen to why: the usual ways in which batching goes wrong, each with its own traces.

A rule looks at the evidence and names one cause or none. The first rule that speaks is the likely cause, so rules stand
from the most to the least specific.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from truebatch.verification.diagnosis.first_difference import ModuleDifference
from truebatch.verification.diagnosis.loss_probe import AVERAGED, COUNTS_PADDING
from truebatch.verification.diagnosis.probes import Leak
from truebatch.verification.diagnosis.reordered import reordered
from truebatch.verification.diagnosis.trace.culprit import Culprit
from truebatch.verification.diagnosis.traced_causes import MIXED, cause_of
from truebatch.verification.report import ArrangementResult, Cause

LATER = "later tokens are seen"
STATEFUL = re.compile(r"conv|rnn|lstm|gru|mamba|ssm|rwkv|recurren|delta|retention|mixer|scan|time_?mix", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All that was seen, for the rules to look at."""

    results: Mapping[str, ArrangementResult]
    alone: Mapping[str, Mapping[int, torch.Tensor]]
    """Outputs of every sample alone."""
    leaks: tuple[Leak, ...]
    first_module: ModuleDifference | None
    mask_error: str
    """What a decoder layer says about a 2-D mask."""
    is_flipped: bool
    """True if exchanging True and False in the masks fixes it."""
    later_tokens: float
    """How far a later token moves earlier ones where it must not."""
    row_zero: Mapping[str, int]
    """Arrangement -> the sample in row 0."""
    longest: int
    culprit: Culprit | None = None
    """The operation with which it begins, where one could be traced."""
    probed: tuple[Cause, ...] = ()
    """What small experiments say of state, loss and gradient: as sure as can be."""
    raised_at: str = ""
    """Where the model raises in a micro-batch, if it does."""
    generates_right: bool = False
    """True if new tokens follow on prompts that are padded on the right."""

    def differs(self, name: str, part: str = "outputs") -> bool:
        """True if this part of an arrangement differs from one by one."""
        return name in self.results and self.results[name].is_over(part)

    def raised(self, name: str) -> bool:
        """True if the model raised in this arrangement."""
        return name in self.results and self.results[name].verdict == "raised"

    def moved(self, name: str) -> frozenset[int]:
        """The samples that moved in an arrangement."""
        return self.results[name].moved if name in self.results else frozenset()


def name_causes(evidence: Evidence) -> list[Cause]:
    """The likely cause first; a fault in the loss is named beside a fault in the outputs."""
    state = [cause for cause in evidence.probed if cause.name == "state kept between calls"]
    if state:
        return state
    about_loss = evidence.probed or ((_loss_rule(evidence),))
    found = [cause for cause in (*_about_outputs(evidence), *about_loss) if cause is not None]
    return found or [cause for cause in [_module_alone(evidence)] if cause is not None]


def _about_outputs(e: Evidence) -> list[Cause]:
    """The first rule that speaks; a model that sees later tokens may mix samples besides, and then that comes first."""
    first = next((cause for rule in OUTPUT_RULES if (cause := rule(e)) is not None), None)
    if first is None:
        return []
    traced = _traced(e) if first.name == LATER else None
    if traced is None or traced.name in _OF_ATTENTION:
        return [first]
    return [traced, first] if traced.name == MIXED else [first, traced]


def _module_alone(e: Evidence) -> Cause | None:
    """A model that gives nothing but a loss: the module is all that is known."""
    over = [r for r in e.results.values() if r.verdict == "different" and not r.has_outputs]
    if e.first_module is None or not over:
        return None
    place = f"'{e.first_module.name}' ({e.first_module.kind})"
    layouts = {r.arrangement.layout for r in over}
    if "packed" in layouts and "right" not in layouts:
        return Cause(
            "packed samples see each other",
            f"{place} is the first module whose result for sample {e.first_module.sample} in a packed row differs from that of "
            "the sample alone",
            "attend inside each sample (truebatch.attend with the table of the row), and let no convolution, state or "
            "statistic run over a border",
        )
    return Cause(
        "unknown",
        f"{place} is the first module whose result for sample {e.first_module.sample} differs from that of the sample alone",
        "look at which cells other than the sample's own reach it",
    )


def _zeros_returned(e: Evidence) -> Cause | None:
    for result in e.results.values():
        if result.whole is None or not result.moved:
            continue
        for name, samples in result.whole.outputs.items():
            empty = [i for i in result.moved if not samples[i].any() and e.alone[name][i].any()]
            if empty:
                return Cause(
                    "exception swallowed",
                    f"samples {empty} get nothing but zeros in '{result.name}', and something else alone: most likely an "
                    "exception is caught and zeros are returned in its place",
                    "let the exception out, fix what raises it, and never return numbers that were not computed",
                )
    return None


def _mask_2d(e: Evidence) -> Cause | None:
    # Encoders may take 2-D masks rightly: what gives the fault away is lost causality, or the mismatch of sizes.
    if not e.mask_error or not (e.later_tokens or e.raised("right padded")):
        return None
    silent = f" Without an error it is not causal: a later token moves earlier ones by {e.later_tokens:.1e}."
    return Cause(
        "2-D mask passed to decoder layers",
        "a decoder layer gets the tokenizer's mask of shape [B, L]. Attention reads it as [queries, keys]: at batch size 1 "
        "it silently drops causality, at batch size 2 it raises a size mismatch, at batch size = length it mixes rows."
        + (silent if e.later_tokens else ""),
        "build the [B, 1, L, L] mask with truebatch.attention.causal_mask.causal_mask_4d, or call the model "
        "that owns the layers",
    )


def _not_causal(e: Evidence) -> Cause | None:
    if not e.later_tokens:
        return None
    return Cause(
        LATER,
        f"changing the last token of a sample moves its earlier cells by {e.later_tokens:.1e}, but the labels are the next "
        "tokens: the model sees the answer",
        "make attention causal (is_causal=True, or a [B, 1, L, L] mask); pass causal=False if the task allows it",
    )


def _batch_statistics(e: Evidence) -> Cause | None:
    if e.first_module is None or "BatchNorm" not in f"{e.first_module.kind} {type(e.first_module.module).__mro__}":
        return None
    return Cause(
        "batch statistics",
        f"{e.first_module.name!r} normalises over all cells of the micro-batch, padding and neighbours included",
        "replace it by LayerNorm, GroupNorm or RMSNorm, or freeze it with .eval() during training",
    )


def _flipped(e: Evidence) -> Cause | None:
    if not e.is_flipped or (e.culprit is not None and cause_of(e.culprit).name not in _OF_ATTENTION):
        return None
    return Cause(
        "mask in the wrong polarity",
        "the model is right once True and False of its masks are exchanged: it attends to the padding and hides the tokens",
        "SDPA reads True as 'may attend', key_padding_mask and most hand-written masks read True as 'ignore': negate it",
    )


_OF_ATTENTION = ("attention mask ignored", "packed samples see each other")


def _row_zero(e: Evidence) -> Cause | None:
    seen = [name for name in ("right padded", "permuted") if e.moved(name)]
    if not seen or any(e.row_zero[name] in e.moved(name) for name in seen):
        return None
    if any(e.longest not in e.moved(name) for name in seen):
        return None
    return Cause(
        "row 0 stands for the whole micro-batch",
        f"only the sample in row 0 is right (sample {e.row_zero[seen[0]]} in '{seen[0]}'), whichever sample that is",
        "compute spans, lengths and positions for every row, as boolean tensors [B, T]; look for an index [0] in the forward",
    )


def _traced(e: Evidence) -> Cause | None:
    """The operation with which it begins knows best."""
    return None if e.culprit is None else cause_of(e.culprit)


def _stateful(e: Evidence) -> Cause | None:
    """A module that walks along the row: it takes in whatever lies before (or, both ways, after) a sample."""
    module = e.first_module
    if module is None or not module.by_cell or not STATEFUL.search(f"{module.kind} {module.name}"):
        return None
    if e.differs("right padded"):
        return Cause(
            "state runs over padding",
            f"the module {module.name!r} ({module.kind}) reads padding as if it were data",
            "pack sequences for recurrent modules, zero the padding before convolutions, or use groups of equal length",
        )
    return Cause(
        "state runs across packed samples",
        f"the module {module.name!r} ({module.kind}) carries what lies before a sample in its row (padding, another sample) "
        "into it",
        "do not pack this model or pad it on the left; use right padding or groups of equal length (choose_layout)",
    )


def _packed_only(e: Evidence) -> Cause | None:
    if not e.differs("packed") or e.differs("right padded") or e.differs("left padded"):
        return None
    if not any(leak.arrangement.startswith("packed") for leak in e.leaks):
        return Cause(
            "positions do not restart",
            "packed samples differ although no neighbour's content reaches them: positions count on over the row",
            "use batch.positions, which begin at 0 in every sample",
        )
    return Cause(
        "packed samples see each other",
        "attention in a packed row reaches over the border between two samples",
        "pass batch.segments to truebatch.attention.api.attend, or restarting positions to a model that uses them",
    )


def _nan_together(e: Evidence) -> Cause | None:
    for result in e.results.values():
        if result.whole is None or result.arrangement.pieces[0].filling != "declared":
            continue
        for name, samples in result.whole.outputs.items():
            bad = [i for i in result.moved if samples[i].isnan().any() and not e.alone[name][i].isnan().any()]
            if bad:
                return Cause(
                    "NaN in micro-batches only",
                    f"samples {sorted(bad)} are NaN in '{result.name}' and finite alone: most likely a softmax over cells "
                    "that are all hidden, a division by a number of cells that is 0, or an overflow in padding",
                    "let every cell attend to itself at least, guard divisions with clamp(min=1), keep padding finite",
                )
    return None


def _samples_mixed(e: Evidence) -> Cause | None:
    """Rows of one sample each cannot see each other through attention: whatever moves them looks over the whole."""
    leak = next((x for x in e.leaks if not x.arrangement.startswith("packed")), None)
    if leak is None:
        return None
    module = "" if e.first_module is None else f"; the first module that differs is {e.first_module.name!r}"
    return Cause(
        MIXED,
        f"changing sample {leak.changed} moves sample {leak.moved}, which lies in another row: something looks over the "
        f"whole micro-batch (a statistic, a ranking, the capacity of experts, negatives from the batch){module}",
        "compute it for every sample alone, freeze it, or declare the samples that belong together one sample",
    )


def _generation(e: Evidence) -> Cause | None:
    if not e.generates_right:
        return None
    return Cause(
        "right padding used for generation",
        "the prompts are padded on the right, so the new tokens of all but the longest are generated after padding, and at "
        "the wrong positions",
        "pad prompts on the left (tokenizer.padding_side = 'left') and pass their attention_mask to generate",
    )


def _last_cell(e: Evidence) -> Cause | None:
    if not e.differs("right padded") or e.differs("left padded") or "left padded" not in e.results:
        return None
    return Cause(
        "the last cell of a row is read",
        "right padded rows differ, left padded ones do not: generation, or a pooling that takes the last cell, reads padding",
        "pad on the left for generation; otherwise take each sample's own last token",
    )


def _left_only(e: Evidence) -> Cause | None:
    if not e.differs("left padded") or e.differs("right padded"):
        return None
    if e.first_module is not None and not e.first_module.by_cell:
        return Cause(
            "the first cell of a row is read",
            "left padded rows differ though every cell is right: a pooling takes cell 0, which is padding",
            "take each sample's own first token, or pad on the right",
        )
    plain, garbage = e.results["left padded"], e.results.get("left padded, padding full of garbage")
    if garbage is not None and _outputs_moved(plain, garbage):
        return _MASK_IGNORED
    return Cause(
        "positions counted from padding",
        "left padded rows differ, whatever the padding holds: positions are counted from the start of the row",
        "count positions from each sample's own first token (batch.positions), and pass them as position_ids",
    )


def _over_padding(e: Evidence) -> Cause | None:
    if not e.differs("right padded"):
        return None
    if e.first_module is not None and not e.first_module.by_cell:
        return Cause(
            "a mean over padding",
            f"every cell is right up to {e.first_module.name!r}, which has one entry a sample: the reduction before it (mean, "
            "sum, max) takes padding in",
            "sum over real cells and divide by their number: (x * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True)",
        )
    if e.first_module is None and not _garbage_moves(e):
        return Cause(
            "a mean over padding",
            "every module gives the right cells, and only the result depends on the width of the row",
            "sum over real cells and divide by their number, not by the width of the row",
        )
    return _MASK_IGNORED


_MASK_IGNORED = Cause(
    "attention mask ignored",
    "what stands in the padding reaches the real cells: the mask is not used",
    "pass is_real to attention (attention_mask for Hugging Face models), for every layer",
)


def _raises(e: Evidence) -> Cause | None:
    if not e.raised_at:
        return None
    return Cause(
        "raises in a micro-batch",
        f"a sample alone runs, several together raise {e.raised_at}",
        "read that line with the shapes of two samples of different lengths in mind, or run it in a debugger",
    )


def _garbage_moves(e: Evidence) -> bool:
    plain, garbage = e.results.get("right padded"), e.results.get("right padded, padding full of garbage")
    return plain is not None and garbage is not None and _outputs_moved(plain, garbage)


def _outputs_moved(a: ArrangementResult, b: ArrangementResult) -> bool:
    if a.whole is None or b.whole is None:
        return False
    return any(not torch.equal(t, b.whole.outputs[n][i]) for n, s in a.whole.outputs.items() for i, t in s.items())


def _garbage_only(e: Evidence) -> Cause | None:
    over = [r for r in e.results.values() if r.arrangement.pieces[0].filling != "declared" and r.is_over("outputs")]
    return _MASK_IGNORED if over and over[0].verdict == "different" else None


def _loss_rule(e: Evidence) -> Cause | None:
    """Outputs agree and the loss does not: it is summed or divided wrongly."""
    wrong = [r for r in e.results.values() if r.is_over("loss") and not r.is_over("outputs")]
    if not wrong or (e.first_module is not None and not any(r.has_outputs for r in wrong)):
        return None
    narrow, wide = e.results.get("right padded"), e.results.get("wider than needed")
    if narrow and wide and narrow.whole and wide.whole and _loss_moved(narrow, wide):
        return COUNTS_PADDING
    return AVERAGED


def _loss_moved(a: ArrangementResult, b: ArrangementResult) -> bool:
    assert a.whole is not None
    assert b.whole is not None
    limit = next((d.limit for d in a.differences if d.part == "loss"), 1e-5)
    pairs = [(a.whole.loss[k], b.whole.loss[k]) for k in a.whole.loss]
    return any(not math.isclose(x, y, rel_tol=limit, abs_tol=1e-12) for x, y in pairs)


OUTPUT_RULES: tuple[Callable[[Evidence], Cause | None], ...] = (
    _zeros_returned,
    _nan_together,
    lambda e: reordered(e.results.values(), e.alone),
    _generation,
    _batch_statistics,
    _mask_2d,
    _not_causal,
    _flipped,
    _traced,
    _row_zero,
    _samples_mixed,
    _stateful,
    _packed_only,
    _last_cell,
    _left_only,
    _over_padding,
    _garbage_only,
    _raises,
)
