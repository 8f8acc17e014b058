"""The model `truebatch` of lm-evaluation-harness: scores that are the same bits at any batch size and in any company.

lm-eval run --model truebatch --model_args pretrained=FOLDER --tasks NAME --batch_size auto

requests -> tokens -> forward passes of fixed shapes -> log-probabilities, greedy or sampled texts

lm-eval that reads entry points finds the model by its name. Up to 0.4.13 it does not: there run
`python -m truebatch.adapters.lm_eval run --model truebatch ...`, or import truebatch before `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import nn

from truebatch import __version__
from truebatch.errors import ConfigError, DataError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt, key_prompts
from truebatch.generation.stop_criteria import find_stop
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.hub import fetch_model
from truebatch.hf.image_fields import image_token_id
from truebatch.hf.load import load_model, without_chatter
from truebatch.hf.processors import load_processor
from truebatch.hf.template_sandbox import apply_template
from truebatch.scoring.backends.fixed_shape_decoder import FixedShapeDecoder
from truebatch.scoring.backends.fixed_shapes import Shapes
from truebatch.scoring.backends.load import DTYPES, choose_device
from truebatch.scoring.batch_plan import DEFAULT_CELLS
from truebatch.scoring.readouts.token_logprobs import ScoredText, TokenLogprobs

_log = logging.getLogger(__name__)
_LENGTH = 2048
"""Of a model that has no limit of its own."""
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
}
_KNOWN = {*_SAMPLING, "do_sample", "until", "max_gen_toks", "seed"}


class TruebatchLM(TemplateLM):  # type: ignore[misc]
    """A causal language model for lm-eval. Its scores do not depend on `batch_size`, `limit` or the order of tasks.

    `cells` decides the shapes of forward passes, and with them the last bits; `batch_size` only how many of their rows
    are used at most: `auto` uses all of them, and is the fastest.
    """

    def __init__(
        self, pretrained: str | nn.Module, *,
        tokenizer: Any = None, device: str | None = None, dtype: str = "auto", batch_size: int | str = 1,
        max_batch_size: int | None = None, max_length: int | None = None, max_gen_toks: int = 256,
        cells: int = DEFAULT_CELLS, add_bos_token: bool | None = None, prefix_token_id: int | None = None,
        check: bool = True, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        _refuse_unknown(unknown)
        self.model, self.tokenizer = _load(pretrained, tokenizer, device, dtype)
        self._device = next(self.model.parameters()).device
        ends = {self.tokenizer.eos_token_id} - {None}
        self.decoder = hf_decoder(self.model)
        self.decoder = hf_decoder(self.model, end_ids=self.decoder.end_ids | ends)
        self.max_length = _length(max_length, self.decoder.max_length)
        self.max_gen_toks, self.add_bos_token, self._prefix = max_gen_toks, add_bos_token, prefix_token_id
        self.batch_size, self._unchecked = batch_size, check
        self.scorer = TokenLogprobs(
            self.decoder, Shapes(_checked_cells(cells)), _vocabulary(self.model), self._filler(),
            _most(batch_size, max_batch_size),
        )  # fmt: skip
        self._say_rows()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token", seen="eos_token=None", do="set tokenizer.eos_token")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing precedes."""
        beginning = self.tokenizer.bos_token_id if self._prefix is None else self._prefix
        return self.eot_token_id if beginning is None else int(beginning)

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens as `--model hf` has them: with the special tokens of the tokenizer, unless the text begins with one."""
        if add_special_tokens is None:
            begins = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = False if begins else self.add_bos_token
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation."""
        return str(
            apply_template(
                self.tokenizer, chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )  # fmt: skip

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows of the model's length."""
        windows = [
            (number, ScoredText((*context, *scored), len(scored)))
            for number, request in enumerate(requests)
            for context, scored in self._windows(request.args[0])
        ]
        found = self._score([text for _, text in windows], "loglikelihood_rolling", disable_tqdm)
        totals = [0.0] * len(requests)
        for (number, _), one in zip(windows, found, strict=True):
            totals[number] += one[0]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        tokens = self.tok_encode(text)
        rolling = utils.get_rolling_token_windows(
            token_list=tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        )
        return [utils.make_disjoint_window(window) for window in rolling]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of continuations; a context that is too long loses its beginning."""
        texts = []
        for words, context, scored in requests:
            if not scored or len(scored) > self.max_length:
                seen = f"{len(scored):,} tokens of {words[1][:80]!r}, the model has {self.max_length:,} positions"
                raise DataError(
                    "a continuation has no tokens, or too many", seen=seen, do="mend this sample of the task"
                )
            texts.append(ScoredText(tuple((context + scored)[-(self.max_length + 1) :]), len(scored)))
        found = self._score(texts, "loglikelihood", disable_tqdm)
        for (words, _context, _scored), one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", words, one)
        return found

    def _score(self, texts: Sequence[ScoredText], what: str, disable_tqdm: bool) -> list[tuple[float, bool]]:
        if self._unchecked and texts:
            self.scorer.check(texts)
            self._unchecked = False
        found = dict(_progress(self.scorer.score(texts), len(texts), what, disable_tqdm))
        return [(found[number].total, found[number].is_greedy) for number in range(len(texts))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, each as if its prompt were alone; sampled ones are keyed by seed, prompt and position."""
        groups: dict[Generation, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._generation(request.args[1]), []).append(number)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        done: dict[int, str] = {}
        texts = (one for settings, numbers in groups.items() for one in self._generate(settings, numbers, prompts))
        for number, text in _progress(texts, len(requests), "generate_until", disable_tqdm):
            done[number] = text
            self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [done[number] for number in range(len(requests))]

    def _generation(self, given: dict[str, Any]) -> Generation:
        wanted = normalize_gen_kwargs(given, self.max_gen_toks)
        unknown = sorted(name for name in set(wanted) - _KNOWN if (name, wanted[name]) != ("num_beams", 1))
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)} cannot be honoured in fixed shapes",
                seen=f"generation_kwargs={given}",
                do=f"use {', '.join(sorted(_KNOWN))}, or --model hf",
            )
        sampling = (
            {ours: wanted[name] for name, ours in _SAMPLING.items() if name in wanted} if wanted["do_sample"] else {}
        )
        stop = tuple(dict.fromkeys(text for text in wanted["until"] if text))
        settings = {"temperature": 0.0, **sampling, "seed": int(wanted.get("seed", 0))}
        return Generation(max_new_tokens=int(wanted["max_gen_toks"]), stop=stop, **settings)

    def _generate(self, settings: Generation, numbers: Sequence[int], tokens: Sequence[list[int]]) -> Iterable[Any]:
        """(number, text) of requests with the same settings; one position of a row stays free for padding."""
        room = self.max_length - settings.max_new_tokens - 1
        if room < 1:
            raise ConfigError(
                "no room is left for a prompt",
                seen=f"max_gen_toks={settings.max_new_tokens} of {self.max_length:,} positions",
                do="lower max_gen_toks",
            )
        ids = [tuple(tokens[number][-room:]) for number in numbers]
        keyed = [Prompt(ids=one, key=key) for one, key in zip(ids, key_prompts(settings.seed, ids), strict=True)]
        decoder = FixedShapeDecoder(self.decoder, self.scorer.shapes, self.scorer.filler, settings.max_new_tokens)
        read = partial(self.tokenizer.decode, skip_special_tokens=True)
        for group in decoder.groups(keyed):
            most = self.scorer.most or len(group)
            for some in (group[at : at + most] for at in range(0, len(group), most)):
                pieces = generate_tokens(decoder, [keyed[at] for at in some], settings, read=read, rows=len(some))
                for at, one in zip(some, collect(pieces, len(some)), strict=True):
                    text = read(list(one.tokens))
                    yield numbers[at], text[: find_stop(text, settings.stop)]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(next(self.model.parameters()).dtype),
            "truebatch": __version__,
            "truebatch_cells": self.scorer.shapes.cells,
        }

    def _filler(self) -> int:
        picture = image_token_id(self.model)
        return next(token for token in (*sorted(self.decoder.end_ids), 0, 1) if token != picture)

    def _say_rows(self) -> None:
        rows = self.scorer.rows(self.scorer.shapes.width(1), 1) - 1
        if self.scorer.most is not None and self.scorer.most < rows:
            _log.warning(
                "truebatch: batch_size=%s uses at most %d of up to %d rows of a forward pass; the scores are the same with "
                "--batch_size auto, which is faster",
                self.batch_size, self.scorer.most, rows,
            )  # fmt: skip


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    given = {name: value for name, value in unknown.items() if value not in (None, False)}
    if given:
        raise ConfigError(
            f"the model truebatch of lm-eval does not know {', '.join(given)}",
            seen=", ".join(f"{name}={value}" for name, value in given.items()),
            do="use pretrained, tokenizer, dtype, cells, max_length, max_gen_toks, add_bos_token, prefix_token_id, check",
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several processes would each do all the work",
            seen=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            do="start one process for each task, or use --model hf",
        )


def _load(pretrained: str | nn.Module, tokenizer: Any, device: str | None, dtype: str) -> tuple[nn.Module, Any]:
    if isinstance(pretrained, nn.Module):
        if tokenizer is None or isinstance(tokenizer, str):
            raise ConfigError(
                "a loaded model needs its tokenizer", seen=f"tokenizer={tokenizer!r}", do="give the object"
            )
        return pretrained.eval(), tokenizer
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("an unknown dtype", seen=f"dtype={dtype!r}", do=f"use auto or one of {', '.join(DTYPES)}")
    folder = fetch_model(Path(pretrained))
    with without_chatter():
        model = load_model(folder)
        words = load_processor(fetch_model(Path(tokenizer)) if isinstance(tokenizer, str) else folder)
    model = model.to(_device(device), None if dtype == "auto" else DTYPES[dtype])
    loaded = tokenizer if tokenizer is not None and not isinstance(tokenizer, str) else words
    return model.eval(), getattr(loaded, "tokenizer", loaded)


def _device(given: str | None) -> torch.device:
    """lm-eval itself says cuda:0 where the user says nothing: without a GPU that is the CPU, as with `--model hf`."""
    if given == "cuda:0" and not torch.cuda.is_available():
        _log.warning("truebatch: there is no GPU here; the model runs on the CPU")
        return torch.device("cpu")
    return choose_device(given or "auto")


def _length(given: int | None, own: int | None) -> int:
    if given is not None and (given < 2 or given > (own or given)):
        do = "give at least 2, at most what the model has"
        raise ConfigError("max_length is out of range", seen=f"max_length={given}, the model has {own}", do=do)
    return given or own or _LENGTH


def _most(batch_size: int | str, max_batch_size: int | None) -> int | None:
    """Most texts of a forward pass; None: as many as its rows hold."""
    text = str(batch_size)
    if text == "auto" or text.startswith("auto:"):
        return max_batch_size
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("an unknown batch size", seen=f"batch_size={batch_size!r}", do="give auto, or 1 or more")
    return int(text)


def _checked_cells(cells: int) -> int:
    if cells < 1:
        raise ConfigError("cells is out of range", seen=f"cells={cells}", do="give 1 or more")
    return cells


def _vocabulary(model: nn.Module) -> int:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ConfigError(
            "this model does not predict next tokens", seen=type(model).__name__, do="use a causal language model"
        )
    return int(head.weight.shape[0])


def _progress(found: Iterable[Any], total: int, what: str, disable: bool) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(found, total=total, desc=f"Running {what} requests", disable=disable)  # type: ignore[no-any-return]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
