"""May prompts be shared in the rows of this model: laid out once, with its completions as their continuations?

model -> what speaks against it, in words -> a trial on a few tokens -> shared | copied | padded, and why
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from truebatch.batch.segments import cell_positions, forest_segments
from truebatch.batch.torch_compile import has_compiled_layers
from truebatch.errors import AttentionError
from truebatch.hf.attention.packed import packed_inputs, packing_plan_of
from truebatch.hf.heads.heads import ModelHead, packed_attention_on, packed_part
from truebatch.hf.mixers.trial_rows import trial_rows
from truebatch.hf.pretrained import dropout_rates
from truebatch.training.memory.oom import is_out_of_memory

Way = Literal["shared", "copied", "padded"]
"""shared: a prompt is laid out once. copied: packed rows, a copy of the prompt for each completion. padded: the same
copies, one a row."""
_TOLERANCE, _COARSE = 1e-4, 6e-2


class RowWay(NamedTuple):
    """How prompts and completions are laid out for one model, and why not in a better way."""

    way: Way
    why: str = ""


def row_way(head: ModelHead, model: nn.Module, *, longest: int) -> RowWay:
    """The best way that gives every completion what it has alone; `longest` is the longest prompt with its completion."""
    if not head.reads_left_to_right:
        return RowWay("padded", f"{type(model).__name__} reads in both directions, or pools in a way of its own")
    if not _packs(head, model):
        return RowWay("padded", "no way to pack the rows of this model was found")
    reason = _against_sharing(head, model, longest)
    return RowWay("copied", reason) if reason else RowWay("shared")


def window_of(model: Any) -> int | None:
    """The shortest window of the model's attention; None where every cell sees all before it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    named = []
    if "sliding_attention" in kinds and getattr(config, "use_sliding_window", True):
        named.append(getattr(config, "sliding_window", None))
    if not kinds.isdisjoint({"chunked_attention", "sliding_attention"}):
        named.append(getattr(config, "attention_chunk_size", None))
    return min((int(one) for one in named if one), default=None)


def drops_out(model: nn.Module) -> bool:
    """Whether a forward pass of this model, as it stands, draws dropout."""
    config = getattr(model, "config", None)
    rates = dropout_rates(config) if config is not None else {}
    layers = [part for part in model.modules() if isinstance(part, nn.Dropout) and part.training and part.p > 0]
    attention = any(name.startswith(("attention_drop", "attn_p")) for name in rates)
    return bool(layers) or (model.training and attention)


def _packs(head: ModelHead, model: nn.Module) -> bool:
    try:
        packing_plan_of(packed_part(head, model))
    except AttentionError:
        return False
    return True


def _against_sharing(head: ModelHead, model: nn.Module, longest: int) -> str:
    name, window = type(model).__name__, window_of(model)
    if has_compiled_layers(model) or isinstance(model, torch._dynamo.OptimizedModule):
        return f"{name} is compiled"
    if window is not None and window < max(longest, 3):
        return f"{name} has a window of {window:,} cells, and a prompt with its completion has {longest:,}"
    if drops_out(model):
        return f"{name} draws dropout, and the cells of a shared prompt would have one noise for several completions"
    if not packing_plan_of(packed_part(head, model)).is_plain:
        return f"{name} has layers that read a whole row, which a completion cannot continue from a shared prompt"
    return _trial(head, model)


_tried: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def _trial(head: ModelHead, model: nn.Module) -> str:
    """Why a shared prompt does not give this model what copies give it; found once."""
    if model not in _tried:
        was_training = [part for part in model.modules() if part.training]
        model.eval()
        try:
            with torch.no_grad():
                _tried[model] = _tried_now(head, model)
        finally:
            for part in was_training:
                part.training = True
    return _tried[model]


def _tried_now(head: ModelHead, model: Any) -> str:
    part: Any = packed_part(head, model)
    most = min(6, (window_of(model) or 18) // 3)  # a trial that reaches beyond a window would be refused
    prompt, one, other, more = (tokens[:most] for tokens in trial_rows(part).tokens[:4])
    segments = forest_segments([len(t) for t in (prompt, one, more, other)], [-1, 0, 1, 0]).to(prompt.device)
    ids = torch.cat([prompt, one, more, other])[None]
    with packed_attention_on(head, model, "packed"):
        try:
            found = part(**tree_inputs(head, model, ids, cell_positions(segments)), **_table(segments))[0][0]
        except AttentionError as error:
            return f"{error.wrong}: {error.seen}"
        except Exception as error:  # whatever a model raises here speaks against it
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    paths = [torch.cat([prompt, one, more]), torch.cat([prompt, other])]
    alone = [part(input_ids=path[None], use_cache=False)[0][0] for path in paths]
    wanted = torch.cat([alone[0], alone[1][len(prompt) :]])
    tolerance = _TOLERANCE if wanted.dtype in (torch.float32, torch.float64) else _COARSE
    if (found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm():
        return ""
    return f"a trial on {type(model).__name__} with a shared prompt gave other outputs than copies of it"


def tree_inputs(head: ModelHead, model: Any, input_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Arguments of a packed call beside the table."""
    found: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if "position_ids" in head.border.accepts:
        found["position_ids"] = positions + head.border.first_position
    if getattr(model.config, "type_vocab_size", 0):
        found["token_type_ids"] = torch.zeros_like(input_ids)
    return found


def _table(segments: Any) -> dict[str, Any]:
    return {name: value for name, value in packed_inputs(segments).items() if name != "position_ids"}
