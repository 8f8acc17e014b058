"""Any Hugging Face architecture as a tiny model with random weights: nothing is downloaded.

architecture + head -> class -> tiny configuration -> model -> weights in which context matters
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.config import tiny_config
from truebatch.testing.tiny_hf.sizes import HEAD_DIM

AUTO_TABLES: Mapping[str, tuple[str, ...]] = {
    "causal_lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "masked_lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "vision_language": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES"),
    "sequence_classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
    "token_classification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",),
    "question_answering": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",),
    "encoder": ("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_MAPPING_NAMES"),
    "speech_ctc": ("MODEL_FOR_CTC_MAPPING_NAMES",),
    "speech_seq2seq": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",),
    "audio_classification": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",),
    "audio_language": ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",),
    "image_and_text": ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    "time_series": (
        "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
        "MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING_NAMES",
        "MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING_NAMES",
    ),
}
"""Head -> the tables of transformers that say which architectures have it."""

OF_HEAD: Mapping[str, Mapping[str, Any]] = {
    "causal_lm": {"is_decoder": True},
    "masked_lm": {"is_decoder": False},
    "encoder": {"is_decoder": False},
}
"""Head -> settings that an architecture which serves several heads needs for this one."""


def tiny_types(head: str) -> list[str]:
    """Names (`model_type`) of all architectures the installed transformers has for this head, sorted."""
    names = set(_classes(head))
    if head == "encoder":
        # A base model counts as an encoder if it fills in masked tokens or says so itself.
        encoders = set(modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES)
        names &= encoders | (set(_classes("masked_lm")) - set(_classes("seq2seq")))
    if head == "audio_language":
        names -= set(_classes("vision_language"))  # those that take images alone are examined as such
    return sorted(names)


def tiny_model(model_type: str, head: str = "causal_lm", seed: int = 0) -> nn.Module:
    """This architecture, tiny: fp32, evaluation mode, all dropouts 0, weights in which attention really matters.

    The same seed gives the same weights. An architecture that cannot be made raises `ConfigError`, whose `seen` is the
    reason, whatever went wrong inside.

    >>> from truebatch.testing.tiny_hf.model import tiny_model
    >>> type(tiny_model("llama")).__name__
    'LlamaForCausalLM'
    """
    model_class = tiny_class(model_type, head)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(tiny_config(_config_type(model_class, model_type), OF_HEAD.get(head, {})))
            randomize_zero_init(model)
    except Exception as error:  # a configuration that does not fit fails in any line of the model's own code
        raise ConfigError(
            f"the architecture {model_type!r} cannot be built tiny as {model_class.__name__}",
            seen=f"{type(error).__name__}: {str(error).strip():.400}",
            do="install what it asks for, or set its sizes in TINY_SIZE_OVERRIDES, truebatch/testing/tiny_hf/size_overrides.py",
        ) from error
    ready: nn.Module = model.float().eval()
    return ready


def tiny_class(model_type: str, head: str) -> Any:
    """The model class transformers has for this architecture and head."""
    found = _classes(head).get(model_type)
    if found is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no {head!r} model of the architecture {model_type!r}",
            seen=f"model_type={model_type!r}, head={head!r}",
            do=f"use one of tiny_types({head!r})",
        )
    return getattr(transformers, found[0] if isinstance(found, tuple | list) else found)


def _classes(head: str) -> dict[str, Any]:
    if head not in AUTO_TABLES:
        raise ConfigError("an unknown head", seen=f"head={head!r}", do=f"use one of {sorted(AUTO_TABLES)}")
    tables = [getattr(modeling_auto, table, {}) for table in AUTO_TABLES[head]]
    return {name: found for table in reversed(tables) for name, found in table.items()}


def _config_type(model_class: Any, model_type: str) -> Any:
    # A text-only class of a larger architecture names its own configuration.
    return getattr(model_class, "config_class", None) or CONFIG_MAPPING[model_type]


LEFT_AS_BUILT = re.compile(r"A_log|time_(decay|first|mix)|dt_bias|inv_freq|position_bias_table")
"""Parameters whose values have a meaning (decay rates, time steps), so that random ones would not be finite."""

OPENED = re.compile(r"gate$|attn_factor|alpha|layer_?scale|lambda|gamma_")
"""Gates and scales that begin at or near zero, which would hide what passes through them."""


@torch.no_grad()
def randomize_zero_init(model: nn.Module) -> None:
    """Matrices that keep signals at the size they come in: then what a cell gives depends on its context."""
    for name, weight in model.named_parameters():
        if not weight.numel() or not weight.is_floating_point() or LEFT_AS_BUILT.search(name):
            continue
        if weight.ndim >= 2:
            weight.normal_(0.0, _spread(name, weight))
        elif OPENED.search(name) and weight.abs().max() < 0.2:
            weight.fill_(0.5)


def _spread(name: str, weight: torch.Tensor) -> float:
    if "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        return 0.5
    # T5 and its kin do not divide scores by the root of the head's width: the query's weights have it in them.
    scale = HEAD_DIM**-0.5 if name.endswith(".q.weight") else 1.0
    return scale / math.sqrt(_fan_in(weight))


def _fan_in(weight: torch.Tensor) -> int:
    if weight.ndim == 3 and weight.shape[-1] > 4:  # one matrix an expert
        return int(weight.shape[-1])
    return max(1, weight[0].numel())
