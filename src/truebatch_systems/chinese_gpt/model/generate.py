"""Text from a trained model: prompts as the training saw them, many at once, each as if it were alone.

question -> 用户：question助手： -> BOS and words -> decoder with a key/value cache -> words -> text without blanks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from truebatch.errors import BatchError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import ROWS, collect, generate_tokens
from truebatch.generation.interface import Prompt, key_prompts, pad_left
from truebatch.generation.stop_criteria import find_stop
from truebatch.generation.text_stream import join_texts, stream_texts
from truebatch.progress import stage
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.dialogues import ASSISTANT, USER, parts_of, prompt_of
from truebatch_systems.chinese_gpt.model.model import Cache, ChineseGPT
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import BOS, EOS, SPECIAL, Vocab


@dataclass(frozen=True, slots=True, eq=False)
class GPTDecoder:
    """`Decoder` of the model: a text is words until EOS, so no other special word is ever chosen."""

    model: ChineseGPT

    @property
    def end_ids(self) -> frozenset[int]:
        """EOS."""
        return frozenset({EOS})

    @property
    def max_length(self) -> int:
        """The positions the model has."""
        return self.model.shape.max_seq_len

    def start(self, prompts: Sequence[Prompt], /) -> tuple[Tensor, GPTSession]:
        """One forward pass over all prompts, padded on the left; [B, V] logits of what follows."""
        if self.model.training:
            raise BatchError(
                "the model is in training mode, where dropout would change what it says",
                seen=f"{type(self.model).__name__}.training is True",
                do="call model.eval() first",
            )
        ids, is_real = pad_left(prompts, self.model.tokens.weight.device)
        session = GPTSession(self.model, is_real)
        return session.forward(ids), session


class GPTSession:
    """Rows that are being continued, with their keys and values."""

    def __init__(self, model: ChineseGPT, is_real: Tensor) -> None:
        self._model = model
        self._is_real = is_real  # [B, S] of all cells, old and new
        self._cache: Cache | None = None

    def advance(self, tokens: Tensor, /) -> Tensor:
        """Append one token to every row; [B, V] logits of what follows."""
        self._is_real = torch.cat([self._is_real, torch.ones_like(self._is_real[:, :1])], dim=1)
        return self.forward(tokens[:, None])

    def select(self, rows: Tensor, /) -> None:
        """Go on with these rows."""
        self._is_real = self._is_real[rows]
        self._cache = None if self._cache is None else self._cache.take_rows(rows)

    def forward(self, ids: Tensor) -> Tensor:
        """The last `ids.shape[1]` cells of every row, behind those in the cache."""
        positions = (self._is_real.long().cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits, self._cache = self._model.forward_step(ids, positions, self._cache, self._is_real)
        last = logits[:, -1].clone()
        last[:, [i for i in range(len(SPECIAL)) if i != EOS]] = -torch.inf
        return last


def dialogue_prompt(question: str) -> str:
    """A question as dialogues have it, up to where the answer begins; what is a dialogue already only gets its cue."""
    text = question.strip()
    if not text.startswith(USER):
        return prompt_of(text)
    return text if ASSISTANT in text.rpartition(USER)[2] else f"{text}{ASSISTANT}"


def prompt_ids(vocab: Vocab, text: str) -> tuple[int, ...]:
    """BOS and the words of a text, cut in the same parts as the samples of the training."""
    return (BOS, *(i for part in parts_of(text) for i in vocab.encode(part.text)))


def stream_continuations(
    model: ChineseGPT, texts: Sequence[str], settings: Generation, *, rows: int = ROWS
) -> Iterator[tuple[int, str]]:
    """(number of the text, what is new) as it comes. What a text gets never depends on the others or their order."""
    vocab = model.vocab
    prompts = [prompt_ids(vocab, text) for text in texts]
    keyed = zip(prompts, key_prompts(settings.seed, prompts), strict=True)
    ready = [Prompt(ids=ids, key=key) for ids, key in keyed]
    pieces = generate_tokens(GPTDecoder(model), ready, settings, read=vocab.decode, rows=rows)
    return stream_texts(pieces, vocab.decode, settings.stop)


def stream_answers(
    config: ChineseGPTConfig, model: nn.Module, prompts: Sequence[str], settings: Generation
) -> Iterator[tuple[int, str]]:
    """`System.generate`: a prompt is a question to 助手; with stage=pretraining it is the beginning of a text."""
    texts = prompts if config.stage == "pretraining" else [dialogue_prompt(prompt) for prompt in prompts]
    return stream_continuations(cast(ChineseGPT, model), texts, settings)


@stage("generating texts")
def continue_texts(model: ChineseGPT, texts: Sequence[str], settings: Generation, *, rows: int = ROWS) -> list[str]:
    """The whole new text of every prompt, in order."""
    return join_texts(stream_continuations(model, texts, settings, rows=rows), len(texts))


def answer_in_context(
    model: ChineseGPT, context: Sequence[int], question: str, settings: Generation
) -> tuple[str, tuple[int, ...]]:
    """The answer to a question after earlier turns, and the turns with it in them.

    Where the model has too few positions for all turns and the new tokens asked for, the oldest words are left out.
    """
    decoder, vocab = GPTDecoder(model), model.vocab
    turn = prompt_ids(vocab, dialogue_prompt(question))[1:]
    room = max(1, decoder.max_length - settings.max_new_tokens - 1)
    window = (*context, *turn)[-room:]
    ids = (BOS, *window)
    prompt = Prompt(ids=ids, key=key_prompts(settings.seed, [ids])[0])
    found = collect(generate_tokens(decoder, [prompt], settings, read=vocab.decode), 1)[0]
    text = vocab.decode(found.tokens)
    return text[: find_stop(text, settings.stop)], (*window, *found.tokens)
