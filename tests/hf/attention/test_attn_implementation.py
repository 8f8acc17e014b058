"""`attn_implementation="truebatch"`: any collator, any cache, padded or packed, equal to one sample at a time."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DataCollatorWithFlattening, PreTrainedModel

from tests.hf.tiny_models import TABLE, alone, assert_equal_gradients, build, draw_tokens, gradients, weigh
from tests.tiny import counting_backend
from truebatch.errors import AttentionError
from truebatch.hf.attention.forward_context import current_run

LENGTHS = [7, 3, 12, 7, 1]
TOKENS = sum(LENGTHS)
TIGHT = {"atol": 1e-6, "rtol": 1e-6}
DECODERS = [name for name in TABLE if "bert" not in name]


@pytest.fixture
def samples() -> list[Tensor]:
    return draw_tokens(LENGTHS)


def exact(name: str, attention: str = "truebatch") -> PreTrainedModel:
    """In double precision, so that 1e-6 tells a wrong mask from rounding."""
    model = build(name, attention=attention).double()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # its grouped products know no double precision
    return model


def flattened(samples: list[Tensor], **options: bool) -> dict[str, Tensor]:
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": sample.tolist()} for sample in samples])
    batch.pop("labels")
    return batch


def by_trl(samples: list[Tensor], multiple: int | None = None) -> dict[str, Tensor]:
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    collator = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple)
    batch = collator([{"input_ids": sample.tolist()} for sample in samples])
    batch.pop("labels")
    return batch


WORDS = {
    "positions": {},
    "table and positions": {"return_flash_attn_kwargs": True},
    "everything": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "table": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
}


@pytest.mark.parametrize("name", TABLE)
def test_every_word_for_packed_rows_gives_the_gradients_of_one_by_one(name, samples):
    expected, wanted = alone(exact(name, "eager"), samples)
    model = exact(name)
    for words, use_cache in product(WORDS, (None, True, False) if name in DECODERS else (None,)):
        model.zero_grad()
        given = flattened(samples, **WORDS[words])
        logits = model(**given, **({} if use_cache is None else {"use_cache": use_cache})).logits[0]
        torch.testing.assert_close(logits.detach(), expected, **TIGHT, msg=lambda text, w=words: f"{w}: {text}")
        weigh(logits).backward()
        assert_equal_gradients(gradients(model), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert"])
def test_a_redundant_mask_and_padding_in_packed_rows_are_no_error(name, samples):
    expected, _ = alone(exact(name, "eager"), samples)
    model = exact(name)
    for words in WORDS:
        given = flattened(samples, **WORDS[words])
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        with torch.no_grad():
            torch.testing.assert_close(model(**given).logits[0], expected, **TIGHT)
    given = by_trl(samples, multiple=16)
    assert given["input_ids"].shape[1] > TOKENS
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits[0, :TOKENS], expected, **TIGHT)
    numbered = torch.cat([torch.full((length,), k + 1) for k, length in enumerate(LENGTHS)])
    row = torch.cat(samples)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(row, attention_mask=numbered[None]).logits[0], expected, **TIGHT)


def test_several_packed_rows_with_padding_behind_a_mask(samples):
    expected, _ = alone(exact("qwen2", "eager"), samples)
    rows, mask, positions = torch.zeros(2, 20, dtype=int), torch.zeros(2, 20, dtype=int), torch.zeros(2, 20, dtype=int)
    for row, picked in enumerate(((0, 1, 3), (2, 4))):
        tokens = torch.cat([samples[k] for k in picked])
        rows[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        positions[row, : len(tokens)] = torch.cat([torch.arange(LENGTHS[k]) for k in picked])
    with torch.no_grad():
        logits = exact("qwen2")(rows, attention_mask=mask, position_ids=positions).logits
    parts = dict(zip((0, 1, 3), logits[0, :17].split([7, 3, 7]), strict=True))
    parts |= dict(zip((2, 4), logits[1, :13].split([12, 1]), strict=True))
    torch.testing.assert_close(torch.cat([parts[k] for k in range(5)]), expected, **TIGHT)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_equal_one_by_one_on_either_side(name, side, samples):
    expected, wanted = alone(exact(name, "eager"), samples)
    model = exact(name)
    width = max(LENGTHS) + 2
    rows, mask = torch.zeros(5, width, dtype=int), torch.zeros(5, width, dtype=int)
    for row, sample in enumerate(samples):
        place = slice(0, len(sample)) if side == "right" else slice(width - len(sample), width)
        rows[row, place], mask[row, place] = sample, 1
    logits = model(input_ids=rows, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits.detach(), expected, **TIGHT)
    weigh(logits).backward()
    assert_equal_gradients(gradients(model), wanted)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_a_batch_with_left_padding_generates_what_each_prompt_generates_alone(name, cache, samples):
    plain, model = exact(name, "eager"), exact(name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    given = [plain.generate(sample[None], **options) for sample in samples]
    width = max(LENGTHS)
    rows, mask = torch.zeros(5, width, dtype=int), torch.zeros(5, width, dtype=int)
    for row, sample in enumerate(samples):
        rows[row, width - len(sample) :], mask[row, width - len(sample) :] = sample, 1
    found = model.generate(rows, attention_mask=mask, cache_implementation=cache, **options)
    for row, one in enumerate(given):
        assert found.sequences[row, width:].tolist() == one.sequences[0, len(samples[row]) :].tolist()
        for mine, other in zip(found.logits, one.logits, strict=True):
            torch.testing.assert_close(mine[row], other[0], **TIGHT)


def test_the_name_is_taken_by_every_way_to_choose_attention(tmp_path, samples):
    expected, _ = alone(exact("llama", "eager"), samples)
    exact("llama", "eager").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="truebatch").double()
    switched = exact("llama", "sdpa")
    switched.set_attn_implementation("truebatch")
    copied = copy.deepcopy(switched)
    for model in (loaded, switched, copied):
        with torch.no_grad():
            torch.testing.assert_close(model(**flattened(samples)).logits[0], expected, **TIGHT)
    switched.set_attn_implementation("sdpa")
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in switched.modules())
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()


def test_a_wrapper_that_calls_forward_is_served_by_the_model_inside(samples):
    expected, _ = alone(exact("llama", "eager"), samples)
    switched = exact("llama", "sdpa")
    switched.set_attn_implementation("truebatch")  # as when it was made with it
    for model in (switched, exact("llama")):
        with torch.no_grad():
            torch.testing.assert_close(model.forward(**flattened(samples)).logits[0], expected, **TIGHT)
    model = exact("llama").model
    given = flattened(samples)
    with pytest.raises(AttentionError, match="outside the call of its model"), torch.no_grad():
        model.forward(**given, use_cache=True)


def test_gradient_checkpointing_with_restarting_positions(samples):
    _, wanted = alone(exact("gpt_neox", "eager"), samples)
    model = exact("gpt_neox").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    weigh(model(**flattened(samples)).logits[0]).backward()
    assert_equal_gradients(gradients(model), wanted)


WRONG = {
    "a table that ends early": ({"cu_seq_lens_q": [0, 7, 12], "cu_seq_lens_k": None}, "does not cover the rows"),
    "positions of the whole row": ({"position_ids": torch.arange(TOKENS)[None]}, "run on into the next sample"),
    "another seq_idx": ({"seq_idx": torch.arange(TOKENS)[None] // 10}, "seq_idx disagrees"),
    "a mask that cuts a sample": ({"attention_mask": (torch.arange(TOKENS) > 3)[None].long()}, "masked in part"),
    "other keys": ({"cu_seq_lens_k": torch.tensor([0, TOKENS])}, "cu_seq_lens_k"),
}


@pytest.mark.parametrize("case", WRONG)
def test_words_that_disagree_are_refused(case, samples):
    change, text = WRONG[case]
    given = flattened(samples, return_flash_attn_kwargs=True) | {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in change.items()
    }
    with pytest.raises(AttentionError, match=text):
        exact("llama")(**given)


def test_rows_that_would_mix_samples_are_refused(samples):
    model = exact("llama")
    row, given = torch.cat(samples)[None], flattened(samples)
    with pytest.raises(AttentionError, match="positions jump forward"):
        model(row, position_ids=torch.tensor([[*range(10), *range(20, 40)]]))
    with pytest.raises(AttentionError, match="reaches from one row into the next"):
        model(row.view(2, 15), cu_seq_lens_q=torch.tensor([0, 12, 30]), position_ids=given["position_ids"].view(2, 15))
    with torch.no_grad():
        cache = model(**given, use_cache=True).past_key_values
    with pytest.raises(AttentionError, match="filled by packed rows"):
        model(row[:, :1], past_key_values=cache)
    with torch.no_grad():
        cache = model(row, use_cache=True).past_key_values
    with pytest.raises(AttentionError, match="a cache of 30 cells"):
        model(**given, past_key_values=cache)
    with pytest.raises(AttentionError, match="carries a state along the row"):
        stateful()(**given)
    with torch.no_grad():
        model(row)  # the errors above left nothing open


def stateful() -> PreTrainedModel:
    config = transformers.Lfm2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="truebatch").eval()


def test_roberta_is_told_where_its_positions_begin(samples):
    config = transformers.RobertaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, type_vocab_size=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.RobertaModel._from_config(config, attn_implementation="eager").double().eval()
    tokens = [sample.clamp(min=2) for sample in samples]
    with torch.no_grad():
        expected = torch.cat([model(sample[None])[0][0] for sample in tokens])
        model.set_attn_implementation("truebatch")
        for options in ({"position_ids_start": 2}, WORDS["table"], WORDS["seq_idx"]):
            torch.testing.assert_close(model(**flattened(tokens, **options))[0][0], expected, **TIGHT)
        with pytest.raises(AttentionError, match=r"position_ids_start=2"):
            model(**flattened(tokens))


@pytest.mark.parametrize("words", ["positions", "everything"])
def test_an_error_in_a_layer_leaves_no_call_open(words, samples):
    model = exact("llama")
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**flattened(samples, **WORDS[words]))
    hook.remove()
    assert current_run() is None


def assert_compiled_equals_alone(model: PreTrainedModel, words: str, **options: object) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=False, **options)
    for seed in range(2):
        own = draw_tokens(LENGTHS, seed=seed)
        expected, wanted = alone(model, own)
        model.zero_grad()
        logits = compiled(**flattened(own, **WORDS[words])).logits[0]
        weigh(logits).backward()
        torch.testing.assert_close(logits.detach(), expected, **TIGHT)
        assert_equal_gradients(gradients(model), wanted)


def test_a_compiled_model_reads_a_table_in_one_whole_graph():
    graphs, keep = counting_backend()
    assert_compiled_equals_alone(exact("llama"), "table", backend=keep, fullgraph=True)
    assert len([graph for graph in graphs if len(graph.graph.nodes) > 50]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt_neox", "bert", "modernbert"])
@pytest.mark.parametrize("words", WORDS)
def test_compiled_models_equal_one_by_one_with_every_word(name, words):
    assert_compiled_equals_alone(exact(name), words)
