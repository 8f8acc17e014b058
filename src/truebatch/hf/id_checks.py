"""What a model can take: ids its vocabulary has, labels its head has. Said by sample and id, before torch says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from truebatch.errors import DataError
from truebatch.hf.heads.heads import ModelHead
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.image_fields import image_token_id

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IDS = ("input_ids", "decoder_input_ids")
LANGUAGE = ("causal_lm", "masked_lm", "seq2seq", "vision_language")


def check_sample(model: nn.Module, head: ModelHead, sample: Mapping[str, Any], at: int) -> None:
    """Raise `DataError` with the sample and the id if the model cannot take it."""
    for name in IDS:
        if name in sample:
            ids = _whole_numbers(sample[name], name, at)
            _check_range(ids, num_ids(model), name, at, besides=image_token_id(model))
    number = _num_labels(model, head)
    if number is not None and "labels" in sample:
        labels = np.atleast_1d(_as_array(sample["labels"]))
        if labels.dtype.kind in "iu":
            _check_range(labels, number, "labels", at, besides=IGNORE)


def num_ids(model: nn.Module) -> int | None:
    """How many ids the model has embeddings for; None where it does not look them up in one table."""
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
    return int(table.num_embeddings) if isinstance(table, nn.Embedding) else None


def _num_labels(model: nn.Module, head: ModelHead) -> int | None:
    config: PretrainedConfig = model.config
    if head.kind.name in LANGUAGE:
        layer = model.get_output_embeddings()  # type: ignore[operator]
        return int(layer.weight.shape[0]) if isinstance(layer, nn.Linear) else None
    is_classes = head.kind.name == "token_classification" or head.loss.term == "sample_nll"
    return int(config.num_labels) if is_classes and int(config.num_labels) > 1 else None


def _whole_numbers(value: Any, name: str, at: int) -> NDArray[Any]:
    if isinstance(value, str):
        raise DataError(
            f"sample {at} is a text, and the model reads ids",
            seen=f"{name}={value[:40]!r}",
            do="pass tokenizer(text)['input_ids'] for every text",
        )
    ids = _as_array(value)
    if ids.size == 0:
        raise DataError(f"sample {at} has no tokens", seen=f"{name} of length 0", do="leave this sample out")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"the {name} of sample {at} are not a list of ids",
            seen=f"shape {ids.shape}, dtype {ids.dtype}",
            do="pass one flat list of whole numbers a sample: tokenizer(text)['input_ids'], without return_tensors",
        )
    return ids


def _check_range(ids: NDArray[Any], number: int | None, name: str, at: int, *, besides: int | None) -> None:
    if number is None:
        return
    wrong = np.flatnonzero(((ids < 0) | (ids >= number)) & (ids != besides))
    if len(wrong):
        raise DataError(
            f"sample {at} has an id the model does not have",
            seen=f"{name}[{wrong[0]}] = {ids[wrong[0]]}; the model has {number:,}, 0 to {number - 1:,}",
            do="use the tokenizer (and the labels) that belong to this model, or resize its embeddings",
        )


def _as_array(value: Any) -> NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
