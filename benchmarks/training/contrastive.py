"""Contrastive training of an encoder: one step of many pairs in packed rows, beside sentence-transformers' cached loss.

A pair is a question and a passage, with log-normal lengths; negatives are all other passages of the step. Both ways take the
gradient of the whole step with two passes; no dropout, the same weights, no update. The collator of sentence-transformers
pads every column to its longest text; a mini-batch is cut out of that. Seconds are those of forward and backward.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.harness.benchmark import Benchmark, Row, option
from truebatch.adapters.sentence_transformers import PackedRankingLoss
from truebatch.batch.microbatch import MicroBatch
from truebatch.data.loader import LoaderConfig, load_steps
from truebatch.hf.embedding.objective import InBatchNegatives, TextEncoder, embedding_head
from truebatch.hf.embedding.texts import LENGTHS
from truebatch.hf.heads.heads import head_of
from truebatch.objective import add_counts
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, take_gradients

SCALE = 20.0
PEER = "sentence-transformers mini-batch "
OURS, LOSS = "truebatch", "truebatch's loss in sentence-transformers"
SIZES = {
    "bert-110m": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128},
}
VOCABULARY, WARM_UP = 30522, 64
SPREAD = 0.6
"""Of the logarithms of lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastiveOptions:
    """What is trained, on how many pairs."""

    device: str = option("cpu", "cpu or cuda.")
    model: str = option("tiny", "bert-110m or tiny: sizes of a BERT with random weights.")
    pairs: tuple[int, ...] = option((256, 64), "Pairs of a step, each a case; the first is the largest.")
    mini_batches: tuple[int, ...] = option((32, 128), "Of sentence-transformers.")
    cells: int = option(4096, "Tokens of a packed row.")
    question: int = option(16, "Mean tokens of a question; none has more than four times as many.")
    passage: int = option(64, "Mean tokens of a passage; none has more than four times as many.")
    rounds: int = option(1, "How often every method is timed; the quickest is kept.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContrastiveCase:
    """The texts of a step and the model, shared by all methods."""

    options: ContrastiveOptions
    columns: tuple[list[Tensor], list[Tensor]]
    sentences: Any
    """A SentenceTransformer around the model."""
    gradients: dict[str, Tensor]
    """What the first peer found, for the others to be compared with."""

    @property
    def model(self) -> nn.Module:
        """The transformer inside."""
        found: nn.Module = self.sentences[0].auto_model
        return found


def prepare(options: ContrastiveOptions, case: str) -> ContrastiveCase:
    """Random texts and random weights, the same in every run."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    number, drawn = int(case.split()[0]), np.random.default_rng(0)
    columns = _texts(drawn, number, options.question), _texts(drawn, number, options.passage)
    sizes = SIZES[options.model]
    longest = 4 * max(options.question, options.passage)
    torch.manual_seed(0)
    config = BertConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=max(512, longest), hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
        modules = [Transformer(folder), Pooling(sizes["hidden_size"], "mean")]
        sentences = SentenceTransformer(modules=modules, device=options.device)
    return ContrastiveCase(options=options, columns=columns, sentences=sentences.train(), gradients={})


def _texts(drawn: np.random.Generator, number: int, mean: int) -> list[Tensor]:
    """Log-normal lengths with this mean."""
    sizes = drawn.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, number).round().clip(2, 4 * mean).astype(int)
    return [torch.from_numpy(drawn.integers(1000, VOCABULARY, size)) for size in sizes]


def measure(case: ContrastiveCase, method: str) -> Row:
    """Seconds, memory and the loss of a step, and how far its gradient is from that of the first method."""
    run = _peer(case, method) if method.startswith(PEER) else _ours(case) if method == OURS else _loss(case)
    device = torch.device(case.options.device)
    _warm_up(case, method)
    case.model.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    tokens = sum(len(text) for column in case.columns for text in column)
    row: Row = {"seconds": seconds, "tokens_per_second": tokens / seconds, "loss": loss}
    gradient = torch.cat([p.grad.flatten().double() for p in case.model.parameters() if p.grad is not None])
    first = case.gradients.setdefault("first", gradient)
    row["gradient_difference"] = float((gradient - first).norm() / first.norm())
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    case.model.zero_grad()
    return row


def _warm_up(case: ContrastiveCase, method: str) -> None:
    """Kernels are loaded and chosen by a small step, which is not timed."""
    columns = case.columns[0][:WARM_UP], case.columns[1][:WARM_UP]
    small = ContrastiveCase(options=case.options, columns=columns, sentences=case.sentences, gradients={})
    (_peer(small, method) if method.startswith(PEER) else _ours(small) if method == OURS else _loss(small))()


def _autocast(case: ContrastiveCase) -> Any:
    return torch.autocast(case.options.device, dtype=torch.bfloat16, enabled=case.options.device == "cuda")


def _padded(case: ContrastiveCase) -> list[dict[str, Tensor]]:
    """As the collator of sentence-transformers makes a column."""
    found = []
    for column in case.columns:
        ids = nn.utils.rnn.pad_sequence(column, batch_first=True)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in column], batch_first=True)
        found.append({"input_ids": ids.to(case.options.device), "attention_mask": real.to(case.options.device)})
    return found


def _peer(case: ContrastiveCase, method: str) -> Callable[[], float]:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    number = int(method.removeprefix(PEER))
    return _run_loss(case, CachedMultipleNegativesRankingLoss(case.sentences, scale=SCALE, mini_batch_size=number))


def _loss(case: ContrastiveCase) -> Callable[[], float]:
    return _run_loss(case, PackedRankingLoss(case.sentences, scale=SCALE, cells=case.options.cells))


def _run_loss(case: ContrastiveCase, loss: nn.Module) -> Callable[[], float]:
    columns = _padded(case)

    def run() -> float:
        with _autocast(case):
            found = loss([dict(column) for column in columns], None)
            found.backward()
        return float(found.detach())

    return run


def _ours(case: ContrastiveCase) -> Callable[[], float]:
    model = case.model
    encoder = TextEncoder(head=embedding_head(head_of(model), scored=False), pooling="mean")
    objective = InBatchNegatives(encoder=encoder, temperature=1 / SCALE)
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.0))], model)
    engine = StepEngine(
        model=model, objective=objective, groups=groups, device=torch.device(case.options.device),
        autocast=lambda: _autocast(case),
    )  # fmt: skip
    batches = _packed(case, encoder)
    counts = add_counts(objective.counts(batch) for batch in batches)
    return lambda: take_gradients(engine, batches, counts, epoch=0).loss["nll"]


def _packed(case: ContrastiveCase, encoder: TextEncoder) -> list[MicroBatch]:
    """The step as `train hf --task embedding` plans it."""
    samples = [
        {"input_ids": torch.cat(pair), LENGTHS: torch.tensor([len(text) for text in pair])}
        for pair in zip(*case.columns, strict=True)
    ]
    lengths = [len(sample["input_ids"]) for sample in samples]
    cells = max(case.options.cells, *lengths)
    plan = build_plan(lengths, PlanConfig(layout="packed", cells=cells, samples_per_step=len(samples)))
    loader = LoaderConfig(pin_memory=case.options.device == "cuda")  # as in a run
    (step,) = load_steps(plan, samples, encoder.head.fields, config=loader)
    return list(step.batches)


def summary(rows: Sequence[Row]) -> Mapping[str, Any]:
    """How much sooner a step is done than with the best mini-batch, and how its memory grows with the step."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found: dict[str, Any] = {}
    for case in cases:
        own = {row["method"]: row for row in rows if row["case"] == case}
        peers = [row["seconds"] for name, row in own.items() if name.startswith(PEER)]
        for name in (OURS, LOSS):
            if peers and name in own:
                found[f"speedup of {name}, {case}"] = min(peers) / own[name]["seconds"]
    memory = [row["peak_gib"] for row in rows if row["method"] == OURS and "peak_gib" in row]
    if len(memory) > 1:
        found["peak memory of the largest step over the smallest"] = max(memory) / min(memory)
    return found


BENCHMARK = Benchmark(
    name="contrastive",
    about=__doc__ or "",
    options=ContrastiveOptions,
    cases=lambda options: [f"{number} pairs" for number in options.pairs],
    methods=lambda options: [*(f"{PEER}{number}" for number in options.mini_batches), OURS, LOSS],
    prepare=prepare,
    measure=measure,
    rounds=lambda options: options.rounds,
    best_of="seconds",
    summary=summary,
    libraries=("transformers", "sentence-transformers"),
)
