"""The table of heads: which classes of transformers have one, what a sample is made of, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from truebatch.batch.fields import Field
from truebatch.batch.microbatch import CELLS, SAMPLES
from truebatch.hf.forward_inputs import TARGETS
from truebatch.hf.heads.losses import IGNORE

_IDS = Field(name="input_ids", dtype="int64")
_LABELS = Field(name="labels", dtype="int64", pad=IGNORE, blank=IGNORE)
_NEXT = Field(name="labels", dtype="int64", pad=IGNORE, blank=IGNORE, shift=1)

OPTIONAL: Mapping[str, Field] = {
    "token_type_ids": Field(name="token_type_ids", dtype="int64"),
    "bbox": Field(name="bbox", dtype="int64"),
}
"""Fields that are taken along where the sample has them and the model takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadKind:
    """A row of the table."""

    name: str
    tables: tuple[str, ...]
    """Tables of transformers that list the classes of this kind."""
    endings: tuple[str, ...]
    """How such classes are named, for those no table lists."""
    fields: tuple[Field, ...]
    needs: frozenset[str] = frozenset({"input_ids"})
    """Arguments without which a class is of another kind after all."""
    axis: str = CELLS
    """What the outputs lie along."""
    outputs: tuple[str, ...] = ("logits",)
    """Attributes of the model's output."""
    loss: str = "token_nll"


KINDS: tuple[HeadKind, ...] = (
    HeadKind(
        name="seq2seq",
        tables=("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
        endings=(),
        fields=(
            _IDS,
            Field(name="decoder_input_ids", axis=TARGETS, dtype="int64"),
            Field(name="labels", axis=TARGETS, dtype="int64", pad=IGNORE, blank=IGNORE),
        ),
        needs=frozenset({"input_ids", "decoder_input_ids"}),
        axis=TARGETS,
    ),
    HeadKind(
        name="vision_language",
        tables=("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES"),
        endings=(),
        fields=(_IDS, _NEXT),
        needs=frozenset({"input_ids", "pixel_values"}),
    ),
    HeadKind(
        name="causal_lm",
        tables=("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
        endings=("ForCausalLM", "LMHeadModel"),
        fields=(_IDS, _NEXT),
    ),
    HeadKind(
        name="masked_lm",
        tables=("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
        endings=("ForMaskedLM",),
        fields=(_IDS, _LABELS),
    ),
    HeadKind(
        name="sequence_classification",
        tables=("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
        endings=("ForSequenceClassification",),
        fields=(_IDS, Field(name="labels", kind="once")),
        axis=SAMPLES,
        loss="sample_nll",
    ),
    HeadKind(
        name="token_classification",
        tables=("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",),
        endings=("ForTokenClassification",),
        fields=(_IDS, _LABELS),
    ),
    HeadKind(
        name="question_answering",
        tables=("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",),
        endings=("ForQuestionAnswering",),
        fields=(
            _IDS,
            Field(name="start_positions", kind="once", dtype="int64"),
            Field(name="end_positions", kind="once", dtype="int64"),
        ),
        outputs=("start_logits", "end_logits"),
        loss="span_nll",
    ),
    HeadKind(
        name="encoder",
        tables=("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_MAPPING_NAMES"),
        endings=("EncoderModel",),
        fields=(_IDS,),
        outputs=("last_hidden_state",),
        loss="half_square",
    ),
)
