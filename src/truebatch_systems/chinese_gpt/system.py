"""The small Chinese GPT as one `System`: `truebatch train chinese_gpt`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from truebatch.planning.lengths.measured_values import Measured
from truebatch.training.data import TrainData
from truebatch.training.system import System, Task, TaskCommands
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.corpus import DIALOGUE
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue
from truebatch_systems.chinese_gpt.data.lint import lint_texts
from truebatch_systems.chinese_gpt.data.prepare import PreparedTexts, prepare
from truebatch_systems.chinese_gpt.data.samples import FIELDS, EncodedTexts
from truebatch_systems.chinese_gpt.eval.evaluate import evaluate
from truebatch_systems.chinese_gpt.model.export import export_model
from truebatch_systems.chinese_gpt.model.generate import stream_answers
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape, vocab_of_weights
from truebatch_systems.chinese_gpt.train.batch_advice import advice_lines, batch_size_for
from truebatch_systems.chinese_gpt.train.layout_choice import choose_layout
from truebatch_systems.chinese_gpt.train.objective import TERM, NextToken


def _measure(ready: PreparedTexts, samples: Sized) -> Measured:
    number = len(samples)
    train = ready.train
    return Measured(
        lengths=train.lengths[:number],
        counts={TERM: train.num_labels[:number]},
        ids=tuple(text.place for text in train.texts[:number]),
        found=f"words of the vocabulary {ready.vocab.hash}",
    )


def _build_model(config: ChineseGPTConfig, ready: PreparedTexts) -> nn.Module:
    model = ChineseGPT(shape_of(config, len(ready.vocab)), seed=config.train.seed, vocab=ready.vocab)
    if ready.weights is not None:
        model.load_state_dict(dict(ready.weights))
    return model


def _restore_model(config: ChineseGPTConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """From the vocabulary stored with the weights: a trained model needs no corpus to generate."""
    vocab = vocab_of_weights(weights)
    return ChineseGPT(shape_of(config, len(vocab)), seed=config.train.seed, vocab=vocab)


def shape_of(config: ChineseGPTConfig, vocabulary: int) -> ModelShape:
    """The sizes of the model that settings ask for."""
    return ModelShape(
        vocabulary=vocabulary,
        embedding_dim=config.embedding_dim,
        hidden_dim=config.hidden_dim,
        layers=config.layers,
        heads=config.heads,
        max_seq_len=config.max_seq_len,
        dropout=config.dropout,
    )


def settle(config: ChineseGPTConfig) -> ChineseGPTConfig:
    """The batch size for this many samples, unless it or the samples of a step are given; the stage, where there is one.

    A corpus without dialogues is one of pretraining: what a run is asked later is then the beginning of a text.
    """
    if config.stage == "both" and not any(is_dialogue(text.text) for text in prepare(config).texts):
        config = replace(config, stage="pretraining")
    train = config.train
    if train.batch_size is not None or train.samples_per_step is not None:
        return config
    number = min(len(prepare(config).train), train.limit or 2**62)
    size = batch_size_for(number)
    # Both: the samples of a step must not follow the number of devices.
    return replace(config, train=replace(train, batch_size=size, samples_per_step=size))


def _describe(config: ChineseGPTConfig, ready: PreparedTexts) -> list[str]:
    train = ready.train
    advice = advice_lines(
        train.lengths,
        batch_size=config.train.batch_size or config.train.num_samples_per_step(),
        learning_rate=config.train.learning_rate,
        fixed=config.max_seq_len,
    )
    return [*_corpus_lines(config, ready), *advice]


def _corpus_lines(config: ChineseGPTConfig, ready: PreparedTexts) -> list[str]:
    files = Counter(text.file for text in ready.texts)
    parts = (ready.train, ready.validation, ready.test)
    train, validation, test = (len(part) if part is not None else 0 for part in parts)
    sizes = f"{train:,} for training, {validation:,} for validation, {test:,} for testing"
    lines = [f"corpus: {len(ready.texts):,} texts in {len(files)} files; {sizes}; equal texts share one of the three"]
    if config.stage == "pretraining" and not any(is_dialogue(text.text) for text in ready.texts):
        lines.append(f"corpus: no dialogues ({DIALOGUE}), so a prompt is the beginning of a text, not a question")
    encoded = [part for part in parts if part is not None]
    lines += [
        line
        for name in ("num_empty", "num_cut", "num_split", "num_dropped")
        if (line := _count_line(config, name, encoded))
    ]
    found = lint_texts(ready.texts, max_seq_len=config.max_seq_len)
    # What is empty or too long has been counted above, with what was done about it.
    lines += [f"corpus: {problem.line()}" for problem in found.problems if problem.kind not in ("empty", "overlong")]
    vocab = ready.vocab
    held = [part for part in encoded if part is not ready.train]
    tokens = sum(int(part.lengths.sum()) for part in held)
    rate = f"{sum(part.num_unknown for part in held) / tokens:.2%} of held-out tokens are unknown" if tokens else ""
    came = "from the run it starts from" if config.start_from is not None else f"backend {config.backend}"
    lines.append(f"vocabulary: {len(vocab):,} words, {came}, hash {vocab.hash}{'; ' if rate else ''}{rate}")
    if ready.validation is None:
        lines.append("no validation samples: nothing stops training early, and the last weights are kept")
    return lines


def _count_line(config: ChineseGPTConfig, name: str, parts: Sequence[EncodedTexts]) -> str:
    number = sum(getattr(part, name) for part in parts)
    words = {
        "num_empty": f"corpus: {number:,} text(s) empty and left out",
        "num_cut": f"corpus: {number:,} text(s) of more than {config.max_seq_len} tokens: the end is kept (overlong=cut)",
        "num_split": f"corpus: {number:,} text(s) of more than {config.max_seq_len} tokens, cut into samples (overlong=split)",
        "num_dropped": f"corpus: {number:,} text(s) of more than {config.max_seq_len} tokens and left out (overlong=drop)",
    }
    return words[name] if number else ""


def _save(model: nn.Module, folder: Path) -> None:
    assert isinstance(model, ChineseGPT)
    export_model(model, folder)


def prepare_task(config: ChineseGPTConfig) -> Task:
    """The texts of a configuration, encoded, with model and loss."""
    ready = prepare(config)
    return Task(
        data=TrainData(samples=ready.train, fields=FIELDS, validation=ready.validation),
        measure=partial(_measure, ready),
        test=lambda: ready.test,
        build_model=partial(_build_model, config, ready),
        objective=NextToken(),
        save=_save,
        commands=TaskCommands(
            describe=partial(_describe, config, ready),
            choose_layout=lambda model: choose_layout(model, ready.train, config.train),
            can_compile=True,
            evaluate=partial(evaluate, config, ready),
        ),
    )


CHINESE_GPT = System(
    name="chinese_gpt",
    config_type=ChineseGPTConfig,
    prepare=prepare_task,
    settle=settle,
    restore_model=_restore_model,
    generate=stream_answers,
)
