"""Text from a model trained by `train hf`: a prompt is laid out as its data was.

prompt -> tokens as in training -> decoder of the task -> tokens -> text as it comes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from truebatch.errors import ConfigError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import generate_tokens
from truebatch.generation.interface import Decoder, Prompt, key_prompts
from truebatch.generation.text_stream import stream_texts
from truebatch.hf.finetune.chat_template import render_question, turn_end_ids
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.record_formats import Chat, Plain, PromptCompletion, Record, read_record
from truebatch.hf.finetune.tokenize import without_end
from truebatch.hf.finetune.vision.encode import templated_tokenizer
from truebatch.hf.finetune.vision.prompts import image_prompts
from truebatch.hf.finetune.vision.read_file import image_processor_of
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.generate.seq2seq import seq2seq_decoder
from truebatch.hf.pretrained import load_tokenizer, num_positions
from truebatch.io.data_files import read_samples
from truebatch.training.distributed.device import find_own_device

_WRITING = ("causal_lm", "seq2seq", "dpo", "vlm")


def generate(
    config: FinetuneConfig, model: nn.Module, prompts: Sequence[str], settings: Generation
) -> Iterator[tuple[int, str]]:
    """`System.generate` of `train hf`: (number of the prompt, new text) as it comes."""
    if config.task not in _WRITING:
        raise ConfigError(
            "this model was trained to classify or to embed; it writes no text",
            seen=f"task={config.task}",
            do="measure it with `truebatch evaluate`, or load its folder `model` with transformers",
        )
    place = find_own_device(config.train)
    tokenizer, keyed = _prompts(config, prompts, settings.seed)
    model.to(place.device)
    read = partial(_read, tokenizer)
    decoder = _decoder(config, model, tokenizer)
    if config.task == "seq2seq":
        settings = _within_positions(model, settings)
    with place.autocast():
        yield from stream_texts(generate_tokens(decoder, keyed, settings, read=read), read, settings.stop)


def _prompts(config: FinetuneConfig, prompts: Sequence[str], seed: int) -> tuple[Any, list[Prompt]]:
    """The tokenizer, and the prompts laid out as the data was."""
    if config.task == "vlm":
        processor = image_processor_of(config.model, config.chat_template)
        return templated_tokenizer(processor) or processor.tokenizer, image_prompts(processor, prompts, seed)
    tokenizer = load_tokenizer(config.model, config.chat_template)
    to_ids = _prompt_encoder(config, tokenizer)
    ids = [to_ids(text) for text in prompts]
    return tokenizer, [Prompt(ids=one, key=key) for one, key in zip(ids, key_prompts(seed, ids), strict=True)]


def _decoder(config: FinetuneConfig, model: nn.Module, tokenizer: Any) -> Decoder:
    ends = {tokenizer.eos_token_id} - {None}
    if config.task == "seq2seq":
        return seq2seq_decoder(model, end_ids=ends)
    return hf_decoder(model, end_ids=ends | turn_end_ids(tokenizer))


def _within_positions(model: nn.Module, settings: Generation) -> Generation:
    most = num_positions(model.config)
    return settings if most is None else replace(settings, max_new_tokens=min(settings.max_new_tokens, most))


def _read(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _prompt_encoder(config: FinetuneConfig, tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    """How the text before an answer became tokens in training."""
    if config.task == "seq2seq":
        return lambda text: tuple(tokenizer(text)["input_ids"])
    kind = _kind_of_data(config, tokenizer)
    if kind is Chat and tokenizer.chat_template is not None:
        return lambda text: tuple(tokenizer(render_question(tokenizer, text), add_special_tokens=False)["input_ids"])
    mark = "\n" if kind is Chat else ""  # a conversation without a template: question, line end, answer
    return lambda text: tuple(without_end(tokenizer, tokenizer(text + mark)["input_ids"]))


def _kind_of_data(config: FinetuneConfig, tokenizer: Any) -> type[Record]:
    """By the first sample; where the data is gone, a tokenizer with a chat template was trained on conversations."""
    if not config.data.exists():
        return Chat if tokenizer.chat_template is not None else Plain
    place, sample = next(read_samples(config.data))
    if config.task == "dpo":
        is_chat = isinstance(sample, dict) and isinstance(sample.get("chosen"), list)
        return Chat if is_chat else PromptCompletion
    return type(read_record(config.task, sample, place))
