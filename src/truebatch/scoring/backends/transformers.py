"""A transformers model in this process as a backend: text or text with images, any readout, any level of
reproducibility.

Padding is on the left and done here, without the tokenizer's own padding side; positions are explicit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from truebatch import __version__
from truebatch.batch.torch_compile import force_eager, has_compiled_layers, uncompile_layers
from truebatch.errors import ConfigError
from truebatch.generation.decode_loop import Continuation, collect, generate_tokens
from truebatch.generation.interface import Decoder, advance_session, start_session
from truebatch.generation.stop_criteria import find_stop
from truebatch.generation.token_trie import TokenTrie, make_token_trie
from truebatch.hf.attention.rope import each_row_alone
from truebatch.hf.forward_inputs import ONE_AT_A_TIME, language_model
from truebatch.hf.generate.decoder import HFDecoder, first_cells, hf_decoder
from truebatch.hf.generate.image_cache import ImageDecoder, ImagePrompt, can_encode_alone
from truebatch.hf.generate.packed_prefill import PackedDecoder, can_read_packed, compile_reading, why_not_packed
from truebatch.hf.generate.prefix_cache import PrefixDecoder
from truebatch.hf.image_fields import image_token_id
from truebatch.hf.numerics import in_fp32
from truebatch.scoring.backends.decoder_chain import PADDED, reused_by, slower_ways_of
from truebatch.scoring.backends.fastest_budget import measured_cells
from truebatch.scoring.backends.fixed_shape_decoder import FixedShapeDecoder
from truebatch.scoring.backends.fixed_shapes import Shapes
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest, ScoreResponse
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.inputs.chat_prompt import MOST, ChatPrompt, label_tokens
from truebatch.scoring.readouts import Generate, Head, Readout, as_labels, describe_readout
from truebatch.scoring.readouts.label_trie import Trie, build_trie, read_labels, read_labels_afresh
from truebatch.scoring.store.content_key import canonical
from truebatch.training.memory.oom import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAMPLED_BYTES = 1 << 16
KEPT_IMAGES = 64
"""Images whose features are cached across batches, if that changes no guaranteed bit."""
ROW = 32_768
"""Row width for compiled layers."""
FOLLOWED = 4
"""Number of answer tokens that `probe` examines: the cache is used from the second on."""


@dataclass(slots=True)
class ModelBackend:
    """A model with its processor and a readout. Make it with `model_backend`."""

    model: nn.Module
    prompting: ChatPrompt
    readout: Readout
    limits: Limits
    decoder: Decoder
    plain: HFDecoder
    name: str
    trie: Trie | None = None
    choices: TokenTrie | None = None
    """The only texts that a structured readout allows."""
    weights: str = ""
    reuse: dict[str, bool] = field(default_factory=dict)

    def describe(self) -> Mapping[str, Any]:
        """Weights, dtype, attention, tokenizer, template, processor, readout, reuse and versions."""
        processor = self.prompting.processor
        config: PretrainedConfig = self.model.config
        weight = next(self.model.parameters())
        return {
            "backend": "transformers",
            "model": self.name,
            "config": _hash(config.to_json_string(use_diff=False)),
            "weights": self.weights,
            "adapter": _adapter(self.model),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "attention": str(getattr(config, "_attn_implementation", "")),
            "tokenizer": _tokenizer_hash(self.prompting.tokenizer),
            "template": _hash(str(getattr(processor, "chat_template", None) or self.prompting.tokenizer.chat_template)),
            "processor": _image_processor(processor),
            "readout": describe_readout(self.readout),
            "reuse": dict(self.reuse),
            "versions": {
                "truebatch": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def cost(self, sample: ScoreRequest, /) -> Cost:
        """From the text and the headers of the images."""
        return self.prompting.cost(sample)

    def prepare(self, sample: ScoreRequest, /) -> ImagePrompt:
        """Tokens and pixels."""
        return self.prompting.prepare(sample)

    def fit(self, samples: Sequence[ScoreRequest]) -> int | None:
        """The most cells of a batch of such samples that memory holds, or, on a CPU, with which they are judged fastest."""
        return measured_cells(self, samples, rows=self.limits.rows)

    def judge(self, prepared: Sequence[ImagePrompt], /) -> Sequence[ScoreResponse | SampleError]:
        """One result per prompt, each as if it were alone."""
        with _whole_or_refused(self.limits):
            if isinstance(self.readout, Head):
                return self._heads(prepared)
            if isinstance(self.readout, Generate):
                return self._texts(prepared, self.readout)
            return self._labels(prepared)

    def probe(self, prepared: Sequence[ImagePrompt], forced: Sequence[Sequence[int]] | None = None, /) -> list[Tensor]:
        """What `check` compares: [S, V] probabilities of the next token after each prompt and after some tokens of an
        answer, where the readout takes several; those of `forced`, else the likeliest. [K] numbers of a head.
        """
        if isinstance(self.readout, Head):
            return list(self._head_values(prepared).double().cpu())
        with _whole_or_refused(self.limits):
            return self._followed(self.decoder, prepared, forced)

    def probe_in_fp32(self, one: ImagePrompt, forced: Sequence[int], /) -> Tensor:
        """The same for one prompt alone with all weights in fp32 and no caches: shows the effect of rounding."""
        with in_fp32(self.model):
            if isinstance(self.readout, Head):
                return self._head_values([one])[0].double().cpu()
            return self._followed(self.plain, [one], [forced])[0]

    def _followed(
        self, decoder: Decoder, prepared: Sequence[ImagePrompt], forced: Sequence[Sequence[int]] | None
    ) -> list[Tensor]:
        groups = (
            list(decoder.groups(prepared)) if isinstance(decoder, FixedShapeDecoder) else [list(range(len(prepared)))]
        )
        if decoder is self.decoder and self._reads_once():
            with torch.inference_mode():
                logits = decoder.logits(prepared)  # type: ignore[attr-defined]
            return list(torch.softmax(logits.double(), dim=-1).cpu()[:, None])
        found: dict[int, Tensor] = {}
        for numbers in groups:
            logits, session = start_session(decoder, [prepared[number] for number in numbers])
            chances = [torch.softmax(logits.double(), dim=-1).cpu()]
            for at in range(min(FOLLOWED, self.prompting.new_tokens) - 1):
                given = chances[-1].argmax(-1).tolist() if forced is None else [forced[n][at] for n in numbers]
                logits = advance_session(session, range(len(numbers)), given, logits)
                chances.append(torch.softmax(logits.double(), dim=-1).cpu())
            found.update(zip(numbers, torch.stack(chances, dim=1), strict=True))
        return [found[number] for number in range(len(prepared))]

    def _reads_once(self) -> bool:
        """True if one packed forward pass is enough and no cache is needed."""
        return isinstance(self.decoder, PackedDecoder) and self.prompting.new_tokens == 1

    def reused(self) -> dict[str, int]:
        """Tokens and images served from caches."""
        return reused_by(self.decoder)

    @torch.inference_mode()
    def try_quick_ways(self, prepared: Sequence[ImagePrompt]) -> None:
        """Find out now, with these prompts, what the first batch would find out."""
        if isinstance(self.decoder, PackedDecoder):
            self.decoder.packs(prepared)

    def slower_ways(self) -> list[str]:
        """Optimisations that did not work for this model, each with the reason."""
        is_free = self.limits.level != "shape" and not isinstance(self.readout, Head)  # else nobody tried
        why = why_not_packed(self.plain) if is_free else ""
        return [*([f"{PADDED}: {why}"] if why else []), *slower_ways_of(self.decoder, self.plain)]

    def close(self) -> None:
        """Undo the compilation of layers for this run: the model belongs to the user."""
        if self.reuse.get("compiled"):
            uncompile_layers(language_model(self.model))

    def _labels(self, prepared: Sequence[ImagePrompt]) -> list[ScoreResponse | SampleError]:
        labels = as_labels(self.readout)
        assert labels is not None
        assert self.trie is not None
        if isinstance(self.decoder, FixedShapeDecoder) or self._reads_once():
            with torch.inference_mode():
                reads = read_labels_afresh(self.decoder.logits, prepared, self.trie)  # type: ignore[attr-defined]
        else:
            reads = read_labels(self.decoder, prepared, self.trie)
        return [labels.answer(read, len(one.ids)) for read, one in zip(reads, prepared, strict=True)]

    def _texts(self, prepared: Sequence[ImagePrompt], readout: Generate) -> list[ScoreResponse | SampleError]:
        settings, tokenizer = readout.settings, self.prompting.tokenizer
        read = partial(tokenizer.decode, skip_special_tokens=True)
        is_pinned = isinstance(self.decoder, FixedShapeDecoder)
        groups = list(self.decoder.groups(prepared)) if is_pinned else [list(range(len(prepared)))]  # type: ignore[attr-defined]
        found: dict[int, Continuation] = {}
        for numbers in groups:
            some = [prepared[number] for number in numbers]
            pieces = generate_tokens(
                self.decoder, some, settings, read=read, rows=len(some) * settings.beams, choices=self.choices
            )
            found.update(zip(numbers, collect(pieces, len(some)), strict=True))
        answers = []
        for number, one in enumerate(prepared):
            text = read(list(found[number].tokens))
            text = text[: find_stop(text, settings.stop)]
            answers.append(readout.answer(text, found[number].ended, len(one.ids) + len(found[number].tokens)))
        return answers

    def _heads(self, prepared: Sequence[ImagePrompt]) -> list[ScoreResponse | SampleError]:
        values = self._head_values(prepared).tolist()
        return [
            ScoreResponse(score=row[0], output={"values": row} if len(row) > 1 else {}, tokens=len(one.ids))
            for row, one in zip(values, prepared, strict=True)
        ]

    @torch.inference_mode()
    def _head_values(self, prepared: Sequence[ImagePrompt]) -> Tensor:
        """[B, K] numbers of the head."""
        assert isinstance(self.readout, Head)
        config: PretrainedConfig = self.model.config.get_text_config()  # type: ignore[union-attr, operator]
        cells = first_cells(self.plain, prepared, pad=config.pad_token_id or 0)
        named = {"attention_mask": cells.is_real.long(), "position_ids": cells.positions, "use_cache": False}
        known = {name: value for name, value in named.items() if name in self.plain.border.accepts}
        written = force_eager() if has_compiled_layers(self.model) else nullcontext()
        with ONE_AT_A_TIME, each_row_alone(self.plain.rotary), written:
            out = self.model(input_ids=cells.ids, **known, **cells.beside)
        values: Tensor = self.readout.read(out) if self.readout.read is not None else out.logits
        if len(values) != len(prepared):
            raise ConfigError(
                "a head must return one number per row",
                seen=f"{tuple(values.shape)} for {len(prepared)} rows",
                do="see Head",
            )
        return values.reshape(len(prepared), -1).float()


def model_backend(
    model: nn.Module, processor: Any, readout: Readout, limits: Limits, *,
    name: str = "", reuse_prefix: bool = True, reuse_images: bool = True, compiled: bool = False,
) -> ModelBackend:  # fmt: skip
    """The backend of a loaded model in evaluation mode.

    `compiled`: on a GPU, the prefill layers are compiled once, for packed rows of one length.
    """
    model.eval()
    processor = _own(processor)
    plain, is_pinned = hf_decoder(model), limits.level == "shape"
    _check_readout(model, readout, is_pinned=is_pinned)
    labels, tokenizer = as_labels(readout), getattr(processor, "tokenizer", processor)
    trie = None if labels is None else build_trie(label_tokens(tokenizer, list(labels.values), labels.prefix))
    new_tokens = readout.settings.max_new_tokens if isinstance(readout, Generate) else trie.depth() if trie else 0
    prompting = ChatPrompt(
        processor=processor, max_length=plain.max_length, new_tokens=new_tokens,
        prefix=labels.prefix if labels is not None else "",
        options=frozenset({MOST} if isinstance(readout, Generate) else ()),
        seed=readout.settings.seed if isinstance(readout, Generate) else 0,
    )  # fmt: skip
    decoder: Decoder = plain
    if reuse_prefix and not is_pinned:
        decoder = PrefixDecoder(plain)
    if can_encode_alone(model) and (reuse_images or is_pinned):
        most = KEPT_IMAGES if reuse_images and limits.level != "plan" else 0
        decoder = ImageDecoder(decoder, model, most=most, together=not is_pinned)
    if compiled:
        _check_compile(readout, limits)
        compile_reading(plain)
    if not is_pinned and can_read_packed(plain):
        decoder = PackedDecoder(decoder, plain, cells=min(ROW, limits.cells or ROW) if compiled else None)
    if is_pinned:
        decoder = FixedShapeDecoder(decoder, Shapes(limits.most_cells), _filler(model, plain), max(1, new_tokens))
    reuse = {"prefix": reuse_prefix and not is_pinned, "images": reuse_images, "compiled": compiled}
    return ModelBackend(
        model=model, prompting=prompting, readout=readout, limits=limits, decoder=decoder, plain=plain,
        name=name or type(model).__name__, trie=trie, choices=_choices(readout, tokenizer),
        weights=weights_hash(model), reuse=reuse,
    )  # fmt: skip


def weights_hash(model: nn.Module) -> str:
    """A hash of the names, shapes and part of the bytes of every parameter: a quick way to detect other weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // (_SAMPLED_BYTES // 4))
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _whole_or_refused(limits: Limits) -> Iterator[None]:
    """At level `shape` a smaller batch has the same shape: out of memory is a configuration error."""
    try:
        yield
    except Exception as error:  # memory runs out in errors of many classes
        if limits.level != "shape" or not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the fixed shape does not fit into memory",
            seen=f"cells={limits.most_cells}: {str(error)[:200]}",
            do="reduce cells and start a new run, or use level `plan`",
        ) from error


def _check_readout(model: nn.Module, readout: Readout, *, is_pinned: bool) -> None:
    if isinstance(readout, Head) and is_pinned:
        raise ConfigError("level `shape` does not support heads", seen="Head(...)", do="use level `plan`")
    if isinstance(readout, Generate) and is_pinned and readout.settings.beams > 1:
        raise ConfigError(
            "level `shape` does not support beams", seen=f"beams={readout.settings.beams}", do="use level `plan`"
        )
    can_speak = getattr(model, "get_output_embeddings", lambda: None)() is not None
    if not isinstance(readout, Head) and not can_speak:
        raise ConfigError(
            "this model does not predict next tokens", seen=type(model).__name__, do="use Head(), or a causal model"
        )


def _choices(readout: Readout, tokenizer: Any) -> TokenTrie | None:
    """The answers of a structured readout as tokens, as they stand behind the line that opens an answer."""
    if not isinstance(readout, Generate) or not readout.structured:
        return None
    if readout.structured != "json":
        seen = f"structured={readout.structured!r}"
        raise ConfigError("only servers take this way to structure an answer", seen=seen, do="use json")
    trie = make_token_trie(label_tokens(tokenizer, readout.choices(), "").values())
    if trie.depth > readout.settings.max_new_tokens:
        raise ConfigError(
            "a structured answer is longer than an answer may be",
            seen=f"{trie.depth} tokens, max_new_tokens={readout.settings.max_new_tokens}",
            do=f"raise max_new_tokens to {trie.depth}",
        )
    return trie


def _check_compile(readout: Readout, limits: Limits) -> None:
    if isinstance(readout, Head) or limits.level == "shape":
        raise ConfigError(
            "only the prefill of packed prompts can be compiled",
            seen="Head(...)" if isinstance(readout, Head) else "level `shape`",
            do="omit compiled (--compile), or use labels or texts at another level",
        )


def _own(processor: Any) -> Any:
    """The processor with a copied tokenizer that neither truncates nor pads: threads share it, the user's is
    unchanged."""
    tokenizer = copy.deepcopy(getattr(processor, "tokenizer", processor))
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        inner.no_truncation()
        inner.no_padding()
    if not hasattr(processor, "tokenizer"):
        return tokenizer
    made = copy.copy(processor)
    made.tokenizer = tokenizer
    return made


def _filler(model: nn.Module, decoder: HFDecoder) -> int:
    picture = image_token_id(model)
    return next(token for token in (*sorted(decoder.end_ids), 0, 1) if token != picture)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _adapter(model: nn.Module) -> str:
    config = getattr(model, "peft_config", None)
    return _hash(canonical({name: str(one) for name, one in config.items()})) if config else ""


def _tokenizer_hash(tokenizer: Any) -> str:
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return _hash(inner.to_str() if inner is not None else canonical(tokenizer.get_vocab()))


def _image_processor(processor: Any) -> dict[str, Any]:
    found = getattr(processor, "image_processor", None)
    if found is None:
        return {"class": type(processor).__name__}
    settings = _hash(str(sorted((name, str(value)) for name, value in found.to_dict().items())))
    return {"class": type(processor).__name__, "images": type(found).__name__, "settings": settings}
