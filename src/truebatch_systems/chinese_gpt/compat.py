"""The original script's own names over the library: `LLM`, its training methods, and layers that take whole batches.

Each of them is a few lines: what they promise (equal to one by one, one update a batch) is the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from truebatch.batch.segments import padded_segments
from truebatch.generation.config import Generation
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.trainer import train
from truebatch_systems.chinese_gpt.batch_loader import Batch, BatchLoader, create_training_batches, make_batch
from truebatch_systems.chinese_gpt.data.corpus import Text
from truebatch_systems.chinese_gpt.data.prepare import best_weights
from truebatch_systems.chinese_gpt.data.samples import FIELDS, EncodedTexts, encode_texts
from truebatch_systems.chinese_gpt.model.generate import answer_in_context, continue_texts, prompt_ids
from truebatch_systems.chinese_gpt.model.model import Block, ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import PAD, Vocab
from truebatch_systems.chinese_gpt.train.objective import NextToken

__all__ = [
    "LLM",
    "PAD_TOKEN_ID",
    "Batch",
    "BatchLoader",
    "Layer",
    "Vocab",
    "create_training_batches",
    "make_batch",
]  # fmt: skip

PAD_TOKEN_ID = PAD
MIN_DELTA = 0.01
"""How much lower the loss must be to count as better, as in the original script."""
HELD_OUT_FROM = 50
"""With this many samples every tenth is held out and decides when to stop; with fewer, the training samples do."""


class LLM:
    """A vocabulary and a network, trained on texts.

    >>> vocab = Vocab.build_from_texts(texts)
    >>> model = LLM(vocab)
    >>> epochs = model.train_monitored_batch(texts, 500, 0.001, 30, 4)
    """

    def __init__(self, vocab: Vocab, network: ChineseGPT | None = None, *, seed: int = 0) -> None:
        self.vocab = vocab
        shape = ModelShape(vocabulary=len(vocab))
        self.network = network if network is not None else ChineseGPT(shape, seed=seed, vocab=vocab)
        self.seed = seed
        self.context: tuple[int, ...] = ()

    @classmethod
    def new(cls, vocab: Vocab, network: ChineseGPT | None = None) -> LLM:
        """The original script's constructor."""
        return cls(vocab, network)

    def forward_batch(self, batch: Batch) -> Tensor:
        """[batch_size, seq_len, V] logits without dropout, of a fresh model too; zeros in padding."""
        with without_dropout(self.network):
            logits: Tensor = self.network(batch.tokens, batch.positions, batch.segments)
        return logits * batch.attention_mask[:, :, None]

    def train(self, data: Sequence[str], epochs: int, lr: float) -> None:
        """One sample at a time, one update each: the original script's first way."""
        self._train(data, TrainConfig(epochs=epochs, learning_rate=lr, batch_size=1, seed=self.seed), None)

    def train_monitored(
        self, data: Sequence[str], epochs: int, lr: float, patience: int, accumulation_steps: int = 1
    ) -> int:
        """One sample a forward pass, one update after `accumulation_steps`; the epochs it took.

        Equal to `train_monitored_batch` with as many samples a batch: only the cut of a step is another.
        """
        config = _monitored(epochs, lr, patience, self.seed)
        return self._train(data, replace(config, batch_size=1, samples_per_step=accumulation_steps), self._held(data))

    def train_monitored_batch(
        self, data: Sequence[str], max_epochs: int, initial_lr: float, patience: int, batch_size: int
    ) -> int:
        """`batch_size` samples a forward pass, one update each, until the loss stops falling; the epochs it took.

        The weights of the best epoch are kept.
        """
        config = _monitored(max_epochs, initial_lr, patience, self.seed)
        return self._train(data, replace(config, batch_size=batch_size), self._held(data))

    def predict(self, text: str, *, temperature: float = 1.0, top_p: float = 0.9, top_k: int = 5) -> str:
        """A drawn continuation of a text."""
        return self.predict_with_sampling(text, temperature, top_p, top_k)

    def predict_with_sampling(self, text: str, temperature: float, top_p: float, top_k: int) -> str:
        """A drawn continuation; a token must be allowed by top_k (0: all) and by top_p (1: all)."""
        settings = Generation(temperature=temperature, top_p=top_p, top_k=top_k, seed=self.seed)
        return continue_texts(self.network.eval(), [text], settings)[0]

    def predict_with_context(self, text: str, temperature: float = 1.0, top_p: float = 0.9, top_k: int = 5) -> str:
        """An answer to 用户 that knows the turns before it, as far as the model's positions reach."""
        settings = Generation(temperature=temperature, top_p=top_p, top_k=top_k, seed=self.seed)
        answer, self.context = answer_in_context(self.network.eval(), self.context, text, settings)
        return answer

    def clear_context(self) -> None:
        """Forget the turns of `predict_with_context`."""
        self.context = ()

    def predict_with_beam_search(self, text: str, beam_width: int, max_length: int) -> str:
        """The likeliest continuation found with `beam_width` beams; `max_length` counts the prompt's tokens too."""
        room = max(1, max_length - len(prompt_ids(self.vocab, text)))
        settings = Generation(beams=beam_width, max_new_tokens=room, temperature=0.0)
        return continue_texts(self.network.eval(), [text], settings)[0]

    def _held(self, data: Sequence[str]) -> Callable[[int], bool]:
        return (lambda i: i % 10 == 9) if len(data) >= HELD_OUT_FROM else (lambda _i: False)

    def _train(self, data: Sequence[str], config: TrainConfig, is_held: Callable[[int], bool] | None) -> int:
        kept = self._encode([text for i, text in enumerate(data) if is_held is None or not is_held(i)])
        held = self._encode([text for i, text in enumerate(data) if is_held is not None and is_held(i)])
        validation = None if is_held is None else held if len(held) else kept
        samples = TrainData(samples=kept, fields=FIELDS, validation=validation)
        with TemporaryDirectory() as folder:
            result = train(self.network, NextToken(), samples, config, out=Path(folder))
            result.raise_if_interrupted()
            if validation is not None:
                self.network.load_state_dict(dict(best_weights(Path(folder))))
        self.network.eval()
        return int(result.records[-1]["epoch"]) + 1 if result.records else 0

    def _encode(self, texts: Sequence[str]) -> EncodedTexts:
        places = [Text(text, "data", number) for number, text in enumerate(texts, start=1)]
        return encode_texts(places, self.vocab, max_seq_len=self.network.shape.max_seq_len, mask_prompt=False)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """While open, a module is in eval mode: dropout is keyed by sample, and a direct call names no samples."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _monitored(epochs: int, lr: float, patience: int, seed: int) -> TrainConfig:
    return TrainConfig(
        epochs=epochs, learning_rate=lr, min_learning_rate=lr / 100, schedule="cosine", patience=patience,
        min_delta=MIN_DELTA, seed=seed, keep=1,
    )  # fmt: skip


class Layer:
    """One layer with the original script's batch methods: real batched matrix operations, and no loop over samples.

    Dropout is drawn by training alone, keyed by sample; called directly, a layer has none.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
        self._last: tuple[Tensor, Tensor] | None = None

    def forward_batch(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, T, H] -> [B, T, H]; padding (0.0 in the mask, on the right) changes nothing and comes out as zeros."""
        mask = torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        leaf = hidden.detach().requires_grad_()
        lengths = mask.sum(1).long()
        is_block = isinstance(self.module, Block)
        with without_dropout(self.module):
            out = self.module(leaf, padded_segments(lengths, hidden.shape[1])) if is_block else self.module(leaf)
        masked = torch.where(mask[:, :, None] > 0, out, 0.0)
        self._last = leaf, masked
        return masked.detach()

    def backward_batch(self, grads: Tensor, lr: float, attention_mask: Tensor | None = None) -> Tensor:
        """The gradient of the last input [B, T, H], zeros in padding; the layer's own weights get one Adam update."""
        assert self._last is not None, "forward_batch comes before backward_batch"
        leaf, out = self._last
        mask = torch.ones(grads.shape[:2]) if attention_mask is None else attention_mask
        self._optimiser.zero_grad()
        torch.autograd.backward(out, torch.where(mask[:, :, None] > 0, grads, 0.0))
        self._optimiser.param_groups[0]["lr"] = lr
        self._optimiser.step()
        assert leaf.grad is not None
        return torch.where(mask[:, :, None] > 0, leaf.grad, 0.0)
