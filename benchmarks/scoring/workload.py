"""What the scoring benchmark runs: models with random weights, prompts of many lengths, and each way to answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from truebatch.batch.torch_compile import uncompile_layers
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt
from truebatch.hf.forward_inputs import language_model
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.image_cache import ImageDecoder, ImagePrompt
from truebatch.hf.generate.packed_prefill import PackedDecoder, compile_reading
from truebatch.scoring.backends.fixed_shape_decoder import FixedShapeDecoder
from truebatch.scoring.backends.fixed_shapes import Shapes
from truebatch.scoring.backends.interface import Cost
from truebatch.scoring.backends.transformers import ROW
from truebatch.scoring.batch_plan import Limits, plan_batches
from truebatch.scoring.readouts.label_trie import build_trie, read_labels_afresh
from truebatch.testing.tiny_hf.model import randomize_zero_init

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE, VISION_START, VISION_END = 3, 4, 5
LABELS = build_trie({"yes": [7], "no": [8]})
Way = Callable[[], list[Any]]
"""Answers in the order of the prompts."""


def make_llama(device: torch.device, *, is_tiny: bool) -> nn.Module:
    """A Llama shape with random weights: tiny, or of 1.1B parameters."""
    sizes = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        if is_tiny
        else {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    )
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=sizes["num_attention_heads"] // 2, vocab_size=512 if is_tiny else 32000,
        max_position_embeddings=4096, pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    return _made(transformers.LlamaForCausalLM, config, device, torch.float32 if is_tiny else torch.bfloat16)


@cache
def make_qwen(device: torch.device, *, is_tiny: bool) -> nn.Module:
    """A Qwen3-VL shape with random weights: tiny, or of 8B parameters in bf16."""
    text, vision = _TINY if is_tiny else _EIGHT
    section = [4, 2, 2] if is_tiny else [24, 20, 20]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": section}
    config = transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope, "max_position_embeddings": 8192, "eos_token_id": 2, "pad_token_id": 0},
        vision_config=vision, image_token_id=IMAGE, video_token_id=6, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )  # fmt: skip
    kind = transformers.Qwen3VLForConditionalGeneration
    return _made(kind, config, device, torch.float32 if is_tiny else torch.bfloat16)


_TINY: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    },
    {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 16, "out_hidden_size": 64,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
)  # fmt: skip
_EIGHT: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "out_hidden_size": 4096, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
)  # fmt: skip


def _made(kind: Any, config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 8B parameters in fp32 would need twice the memory while they are made
    try:
        with torch.device(device):
            model: nn.Module = kind(config)
    finally:
        torch.set_default_dtype(before)
    if device.type == "cpu":
        randomize_zero_init(model)
    return model.eval()


def text_prompts(lengths: Sequence[int], vocabulary: int) -> list[Prompt]:
    """Random tokens of these lengths."""
    draw = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(9, vocabulary, (length,), generator=draw).tolist()) for length in lengths]
    return [Prompt(ids=one, key=number) for number, one in enumerate(ids)]


def picture_prompts(number: int, tokens: int, side: int, vocabulary: int) -> list[ImagePrompt]:
    """Prompts of about this many tokens, each with an image of its own of side x side patches."""
    draw = torch.Generator().manual_seed(2)
    width = 3 * 2 * 16 * 16
    out = []
    for at in range(number):
        words = tokens - side * side // 4 - 2 + (at % 5) * max(1, tokens // 50)
        text = torch.randint(9, vocabulary, (max(2, words),), generator=draw).tolist()
        ids = [*text[:-1], VISION_START, *[IMAGE] * (side * side // 4), VISION_END, text[-1]]
        inputs = {
            "pixel_values": torch.randn(side * side, width, generator=draw),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }
        out.append(ImagePrompt(ids=tuple(ids), key=at, inputs=inputs, image_hashes=(at.to_bytes(4, "big"),)))
    return out


def batches_of(prompts: Sequence[Prompt], *, cells: int, rows: int, new_tokens: int) -> list[list[int]]:
    """Numbers of prompts that are answered together, as a run plans them."""
    costs = {f"{n:06d}": Cost(tokens=len(p.ids), new_tokens=new_tokens) for n, p in enumerate(prompts)}
    return [[int(key) for key in batch] for batch in plan_batches(costs, Limits(cells=cells, rows=rows))]


@dataclass(frozen=True, eq=False)
class Ours:
    """Our way: labels (0 new tokens) or greedy texts, in planned batches; every image is encoded anew."""

    model: nn.Module
    prompts: Sequence[Prompt]
    cells: int
    rows: int
    new_tokens: int
    is_pinned: bool = False
    is_compiled: bool = False
    """With compiled layers, in rows of `ROW` cells."""

    def __call__(self) -> list[Any]:
        """All answers, in the order of the prompts."""
        found: dict[int, Any] = {}
        for numbers in self._groups():
            found.update(zip(numbers, self._some([self.prompts[n] for n in numbers]), strict=True))
        return [found[number] for number in range(len(self.prompts))]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """While open, layers are compiled if they are to be; two prompts have been answered, which is not timed."""
        if self.is_compiled:
            compile_reading(hf_decoder(self.model))
        try:
            few = self.prompts[:2]
            self._some([few[n] for n in next(iter(self.decoder.groups(few)))] if self.is_pinned else few)
            if self.is_compiled:
                enough = 1 + ROW // len(self.prompts[0].ids)
                with torch.inference_mode():
                    self.decoder.logits(self.prompts[:enough])  # rows of both lengths
            yield
        finally:
            if self.is_compiled:
                uncompile_layers(language_model(self.model))

    @cached_property
    def decoder(self) -> Any:
        """As a run makes it."""
        has_images = bool(self.prompts[0].inputs)
        plain = hf_decoder(self.model, end_ids=() if self.new_tokens and has_images else None)
        padded: Any = ImageDecoder(plain, self.model, most=0, together=not self.is_pinned) if has_images else plain
        if self.is_pinned:
            return FixedShapeDecoder(padded, Shapes(self.cells), 2, max(1, self.new_tokens))
        return PackedDecoder(padded, plain, cells=ROW if self.is_compiled else None)

    def _groups(self) -> Iterable[Sequence[int]]:
        if self.is_pinned:
            groups: Iterable[Sequence[int]] = self.decoder.groups(self.prompts)
            return groups
        return batches_of(self.prompts, cells=self.cells, rows=self.rows, new_tokens=self.new_tokens)

    def _some(self, chosen: Sequence[Prompt]) -> list[Any]:
        if self.new_tokens:
            settings = Generation(max_new_tokens=self.new_tokens, temperature=0.0)
            pieces = generate_tokens(self.decoder, chosen, settings, rows=len(chosen))
            return [one.tokens for one in collect(pieces, len(chosen))]
        with torch.inference_mode():
            return [one.probabilities for one in read_labels_afresh(self.decoder.logits, chosen, LABELS)]


@torch.inference_mode()
def _transformers(model: Any, prompts: Sequence[Prompt], side: str, new_tokens: int) -> list[tuple[int, ...]]:
    """`generate` of transformers for one batch of texts, padded on this side."""
    longest = max(len(p.ids) for p in prompts)
    device = next(model.parameters()).device
    ids, real = (torch.zeros(len(prompts), longest, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        first = longest - len(prompt.ids) if side == "left" else 0
        ids[row, first : first + len(prompt.ids)] = torch.tensor(prompt.ids)
        real[row, first : first + len(prompt.ids)] = 1
    given = {"input_ids": ids.to(device), "attention_mask": real.to(device)}
    out: Tensor = model.generate(**given, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return [_cut(row[longest:].tolist()) for row in out]


def theirs(model: nn.Module, prompts: Sequence[Prompt], *, size: int, side: str, new_tokens: int) -> Way:
    """transformers' own way: batches in the order of the data."""

    def run() -> list[Any]:
        starts = range(0, len(prompts), size)
        return [one for at in starts for one in _transformers(model, prompts[at : at + size], side, new_tokens)]

    return run


def _cut(tokens: Sequence[int]) -> tuple[int, ...]:
    """New tokens up to the one that ends a text."""
    out = list(tokens)
    return tuple(out[: out.index(2)] if 2 in out else out)
