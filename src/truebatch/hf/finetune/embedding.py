"""What `train hf --task embedding` does otherwise: the loss over pairs of texts, pooling, and files beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.hf.embedding.objective import InBatchNegatives, SimilarityScores, TextEncoder, embedding_head
from truebatch.hf.embedding.pooling import Pooling
from truebatch.hf.embedding.sentence_folder import max_length_of, pooling_of, write_sentence_files
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.token_store import ONCE, TokenStore
from truebatch.hf.heads.heads import ModelHead
from truebatch.objective import Objective


def head_for_pairs(head: ModelHead, config: FinetuneConfig, train: TokenStore) -> ModelHead:
    """The head of an encoder with the fields of pairs; refused where something else comes out."""
    if head.kind.name != "encoder":
        raise ConfigError(
            "embeddings are read from a model without a head",
            seen=f"a head of kind {head.kind.name!r}",
            do="give a folder whose architecture transformers loads with AutoModel",
        )
    is_scored = f"{ONCE}score" in train.columns
    if is_scored and config.temperature != FinetuneConfig.__dataclass_fields__["temperature"].default:
        raise ConfigError(
            "the temperature is for pairs without a score",
            seen=f"temperature={config.temperature}, and every pair of {config.data} has a score",
            do="leave temperature out: the cosine of two texts is compared with their score",
        )
    return embedding_head(head, scored=is_scored)


def settled_pooling(config: FinetuneConfig, configuration: Any) -> Pooling:
    """How texts are pooled: as set, as the folder says, else by the kind of model."""
    if config.pooling != "auto":
        return config.pooling
    is_decoder = any(str(name).endswith("ForCausalLM") for name in configuration.architectures or ())
    return pooling_of(config.model) or ("last" if is_decoder else "mean")


def longest_text(config: FinetuneConfig, positions: int | None) -> int | None:
    """Most tokens of a text where the settings give none."""
    known = [n for n in (positions, max_length_of(config.model)) if n is not None]
    return min(known, default=None)


def objective_for_pairs(head: ModelHead, config: FinetuneConfig, configuration: Any) -> Objective:
    """In-batch negatives over the whole step, or the squared error of scores."""
    encoder = TextEncoder(head=head, pooling=settled_pooling(config, configuration))
    if head.loss.term == "squared_error":
        return SimilarityScores(encoder=encoder)
    return InBatchNegatives(encoder=encoder, temperature=config.temperature)


def describe_embedding(head: ModelHead, config: FinetuneConfig, configuration: Any) -> str:
    """How embeddings are made and what they learn, in a line."""
    pooling = settled_pooling(config, configuration)
    if head.loss.term == "squared_error":
        return f"embeddings: {pooling} of the last states; the cosine of a pair is to be its score"
    return (
        f"embeddings: {pooling} of the last states; every anchor against all positives and negatives of its step, "
        f"temperature {config.temperature:g}"
    )


def save_sentence_files(config: FinetuneConfig, configuration: Any, folder: Path) -> None:
    """The exported folder is one of sentence-transformers, too."""
    width = int(configuration.get_text_config().hidden_size)
    pooling = settled_pooling(config, configuration)
    write_sentence_files(config.model, folder, pooling=pooling, width=width, max_length=config.max_length)
