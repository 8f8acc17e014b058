"""Text that is made up, so that two tiny donors can be trained anywhere: words of three topics, order-2 chains.

seed -> chains -> ragged samples -> train / validation / test files, and a tokenizer of whole words
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from truebatch.io.atomic_files import write_text
from truebatch.planning.rows import Ints

TOPICS = (
    "pan soup salt bread knife oven cook stir taste plate onion garlic butter flour sugar boil bake serve spoon lid "
    "stove bowl pepper rice fish",
    "boat wave sail wind rope deck captain harbour anchor storm gull net tide shore island mast crew drift row cabin "
    "current reef lantern compass fog",
    "tree leaf bear river path moss owl branch hunter wolf fern root deer valley stone nest beaver pine hill trail "
    "cave mushroom fox snow lake",
)
SHARED = "the a and of in with then under over near when while slowly again still old small quiet"
END, UNKNOWN = "<end>", "<unknown>"
_FOLLOWERS, _WEIGHTS = 3, (0.6, 0.3, 0.1)
_CLASSES = 3
MAX_LENGTH = 64


def words() -> list[str]:
    """The vocabulary: the end of a text, an unknown word, shared words, the words of each topic."""
    found = [END, UNKNOWN, *SHARED.split(), *(word for topic in TOPICS for word in topic.split())]
    return list(dict.fromkeys(found))


def make_tokenizer() -> Any:
    """A tokenizer of whole words, as a folder of save_pretrained holds it."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words())}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END, unk_token=UNKNOWN)


def make_texts(number: int, *, seed: int) -> list[str]:
    """Ragged texts: the next word follows from the last, from the class of the one before, and from the topic."""
    chains = [_chain(topic) for topic in TOPICS]
    generator = np.random.default_rng(seed)
    lengths = _lengths(number, generator)
    return [" ".join(_walk(chains[generator.integers(len(chains))], int(n), generator)) for n in lengths]


def _lengths(number: int, generator: np.random.Generator) -> Ints:
    """Log-normal around 18 words; one in twenty has one or two words, one in fifty the most there are."""
    lengths = np.exp(generator.normal(np.log(18), 0.7, number)).round().clip(4, MAX_LENGTH).astype(np.int64)
    kind = generator.random(number)
    lengths[kind < 0.05] = generator.integers(1, 3, number)[kind < 0.05]
    lengths[kind > 0.98] = MAX_LENGTH
    return lengths


def _chain(topic: str) -> dict[tuple[str, int], list[str]]:
    """What may follow (word, class of the word before): fixed by the words themselves, the same for every seed."""
    own = topic.split() + SHARED.split()
    generator = np.random.default_rng(len(topic) * 1009 + sum(map(ord, topic)))
    return {
        (word, group): [str(w) for w in generator.choice(own, _FOLLOWERS, replace=False)]
        for word in own
        for group in range(_CLASSES)
    }


def _walk(chain: dict[tuple[str, int], list[str]], length: int, generator: np.random.Generator) -> list[str]:
    starts = sorted({word for word, _ in chain})
    out = [starts[generator.integers(len(starts))]]
    group = 0
    while len(out) < length:
        following = chain[out[-1], group]
        group = sum(map(ord, out[-1])) % _CLASSES
        out.append(following[int(generator.choice(_FOLLOWERS, p=_WEIGHTS))])
    return out


def write_corpus(folder: Path, *, samples: int, seed: int) -> None:
    """`train.jsonl`, `validation.jsonl` and `test.jsonl`, each whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = max(samples // 10, 20)
    for number, (name, size) in enumerate((("train", samples), ("validation", held_out), ("test", held_out))):
        file = folder / f"{name}.jsonl"
        if not file.exists():
            lines = [json.dumps({"text": text}) for text in make_texts(size, seed=seed * 3 + number)]
            write_text(file, "\n".join(lines) + "\n")
