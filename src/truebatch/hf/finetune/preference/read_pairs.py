"""Lines with a better and a worse answer, as token ids: prompt, chosen, rejected.

{prompt, chosen, rejected}, texts or messages; without `prompt`, what both begin with -> encoded, cached
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.hf.finetune.chat_template import encode_chat
from truebatch.hf.finetune.preference.pair_rows import PARTS
from truebatch.hf.finetune.record_formats import ANSWERING, Chat, Message, read_messages
from truebatch.hf.finetune.token_store import TokenStore, load_encoded, make_columns, save_encoded
from truebatch.hf.finetune.tokenize import FileTokenizer, with_end, without_end
from truebatch.hf.heads.losses import IGNORE
from truebatch.io.data_files import read_samples
from truebatch.planning.lengths.measure import content_hash
from truebatch.progress import counted

WAY = "pairs-1"
"""Raised whenever the same file would be encoded differently."""
KEYS = "prompt + chosen + rejected, or chosen + rejected that begin alike; texts, or lists of messages"
Ids = list[int]


@dataclass(frozen=True, slots=True)
class PairIds:
    """A pair as token ids."""

    prompt: Ids
    chosen: Ids
    rejected: Ids

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def encode_pairs(encoder: FileTokenizer, path: Path) -> TokenStore:
    """Every pair of a file, encoded; taken from the cache if the same content was encoded the same way before."""
    key = [WAY, content_hash(path), encoder.fingerprint, str(encoder.max_length), encoder.overlong]
    name = "tokens-" + hashlib.blake2b("\0".join(key).encode(), digest_size=16).hexdigest()
    file = encoder.cache / f"{name}.npz" if encoder.cache is not None else None
    known = load_encoded(file) if file is not None else None
    if known is not None:
        return known
    pairs = [
        (place, encode_pair(encoder.tokenizer, sample, place))
        for place, sample in counted(read_samples(path), f"tokenising {path}")
    ]
    if not pairs:
        raise DataError(f"{path} holds no samples", seen="nothing to train on", do="check that it is the right file")
    kept, notes = _fit(encoder, pairs, path)
    columns = make_columns(
        [
            {
                "input_ids": [*pair.prompt, *pair.chosen, *pair.rejected],
                PARTS: [len(pair.prompt), len(pair.chosen), len(pair.rejected)],
            }
            for pair in kept
        ]
    )
    store = TokenStore(columns, (), (_described(kept), *notes))
    if file is not None:
        save_encoded(store, file)
    return store


def encode_pair(tokenizer: Any, sample: Any, place: str) -> PairIds:
    """One line of data; anything else raises `DataError` with its file and line."""
    if not isinstance(sample, Mapping) or not {"chosen", "rejected"} <= set(sample):
        raise DataError(
            f"{place} holds no pair of answers{_unpaired(sample)}",
            seen=f"keys: {', '.join(map(str, sample))}"
            if isinstance(sample, Mapping)
            else f"a {type(sample).__name__}",
            do=f"a line holds {KEYS}",
        )
    found = _of_messages if isinstance(sample["chosen"], list) else _of_texts
    pair = found(tokenizer, sample, place)
    for name in ("prompt", "chosen", "rejected"):
        if not getattr(pair, name):
            raise DataError(f"{place} has no tokens of its {name}", seen="an empty text", do="remove that line")
    if pair.chosen == pair.rejected:
        raise DataError(
            f"{place}: both answers are the same", seen=f"{len(pair.chosen)} equal tokens", do="remove that line"
        )
    return pair


def _unpaired(sample: Any) -> str:
    is_unpaired = isinstance(sample, Mapping) and {"completion", "label"} <= set(sample)
    return "; it looks like data for KTO, whose samples depend on each other" if is_unpaired else ""


def _of_texts(tokenizer: Any, sample: Mapping[str, Any], place: str) -> PairIds:
    """Prompt and answers are encoded apart, as they are when the model is used: the prompt is there first."""
    texts = {name: sample[name] for name in ("prompt", "chosen", "rejected") if sample.get(name) is not None}
    wrong = next((name for name, text in texts.items() if not isinstance(text, str)), None)
    if wrong is not None or len(texts) < 2 + ("prompt" in sample):
        raise DataError(
            f"{place} needs texts, or lists of messages, all three of one kind",
            seen=", ".join(f"{name}: {type(sample.get(name)).__name__}" for name in ("prompt", "chosen", "rejected")),
            do=f"a line holds {KEYS}",
        )
    if "prompt" not in texts:
        chosen, rejected = (with_end(tokenizer, tokenizer(texts[name])["input_ids"]) for name in ("chosen", "rejected"))
        return _cut_in_common(chosen, rejected, place)
    prompt = without_end(tokenizer, tokenizer(texts["prompt"])["input_ids"])
    chosen, rejected = (
        with_end(tokenizer, tokenizer(texts[name], add_special_tokens=False)["input_ids"])
        for name in ("chosen", "rejected")
    )
    return PairIds(prompt, chosen, rejected)


def _cut_in_common(chosen: Ids, rejected: Ids, place: str) -> PairIds:
    """The prompt is what both begin with; each answer keeps a token."""
    alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    alike = min(alike, len(chosen) - 1, len(rejected) - 1)
    if alike < 1:
        raise DataError(
            f"{place} has no prompt, and its answers begin differently",
            seen=f"first tokens {chosen[:1]} and {rejected[:1]}",
            do="give the prompt under its own key",
        )
    return PairIds(chosen[:alike], chosen[alike:], rejected[alike:])


def _of_messages(tokenizer: Any, sample: Mapping[str, Any], place: str) -> PairIds:
    chosen, rejected = (read_messages(sample[name], f"{place}: {name}") for name in ("chosen", "rejected"))
    prompt: Sequence[Message] = ()
    if sample.get("prompt") is not None:
        given = sample["prompt"]
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
        prompt = read_messages(turns, f"{place}: prompt", needs_answer=False)
    else:
        alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
        prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if len(answer) != 1 or answer[0]["role"] != ANSWERING or not prompt:
            raise DataError(
                f"{place}: {name} is not one answer to a prompt",
                seen=f"roles: {', '.join(m['role'] for m in (*prompt, '|', *answer) if isinstance(m, dict)) or 'none'}",
                do="give the conversation before under prompt, and one message of the assistant for each answer",
            )
    one, other = (_encoded(tokenizer, prompt, answer[0], place) for answer in (chosen, rejected))
    if one[0] != other[0]:
        raise DataError(
            f"{place}: the chat template writes the prompt differently before each answer",
            seen=f"{len(one[0])} and {len(other[0])} tokens",
            do="give another template with --set chat_template=FILE",
        )
    return PairIds(one[0], one[1], other[1])


def _encoded(tokenizer: Any, prompt: Sequence[Message], answer: Message, place: str) -> tuple[Ids, Ids]:
    """Tokens before an answer, and its own."""
    if tokenizer.chat_template is None:
        if len(prompt) != 1 or prompt[0]["role"] != "user":
            raise DataError(
                f"{place}: the tokenizer has no chat template for this conversation",
                seen=f"roles: {', '.join(message['role'] for message in prompt)}",
                do="give a template with --set chat_template=FILE, or give texts",
            )
        before = without_end(tokenizer, tokenizer(f"{prompt[0]['content']}\n")["input_ids"])
        return before, with_end(tokenizer, tokenizer(str(answer["content"]), add_special_tokens=False)["input_ids"])
    ids, labels = encode_chat(tokenizer, Chat((*prompt, answer), first_learned=len(prompt)), place)
    learned = [at for at, label in enumerate(labels) if label != IGNORE]
    return ids[: learned[0]], ids[learned[0] : learned[-1] + 1]


def _fit(encoder: FileTokenizer, pairs: Sequence[tuple[str, PairIds]], path: Path) -> tuple[list[PairIds], list[str]]:
    most = encoder.max_length
    long = [(place, pair) for place, pair in pairs if most is not None and pair.longest > most]
    if not long or most is None:
        return [pair for _, pair in pairs], []
    words = f"{len(long):,} of {len(pairs):,} samples have more than {most:,} tokens"
    if encoder.overlong == "refuse":
        place, worst = max(long, key=lambda one: one[1].longest)
        raise DataError(
            f"{path}: {words}",
            seen=f"{place} has {worst.longest:,} tokens",
            do="--set overlong=drop leaves them out, --set overlong=cut keeps their beginnings; both are counted",
        )
    if encoder.overlong == "cut":
        room = [(pair, most - len(pair.prompt)) for _, pair in pairs]
        cut = [PairIds(pair.prompt, pair.chosen[:left], pair.rejected[:left]) for pair, left in room if left > 0]
        kept = [pair for pair in cut if pair.chosen != pair.rejected]
        lost = f"; {len(pairs) - len(kept):,} have nothing left to tell apart" if len(kept) < len(pairs) else ""
        notes = [f"{words}: cut{lost}"]
    else:
        kept, notes = [pair for _, pair in pairs if pair.longest <= most], [f"{words}: dropped"]
    if not kept:
        raise DataError(f"{path}: no sample is left", seen=notes[0], do="raise max_length")
    return kept, notes


def _described(pairs: Sequence[PairIds]) -> str:
    prompts = sum(len(pair.prompt) for pair in pairs)
    answers = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    return f"{len(pairs):,} pairs, {prompts:,} tokens of prompts, {answers:,} of answers"
