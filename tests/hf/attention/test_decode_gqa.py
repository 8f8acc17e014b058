"""One token a row without copied heads: equal to sdpa call by call, and to the old way of generating step by step."""

from __future__ import annotations

import pickle
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.scoring.workload import make_qwen
from tests.generation.toys import make_prompts
from tests.hf.tiny_models import build
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.hf.attention.decode_gqa import NAME, attend_folded, folded_attention, grouped_configs
from truebatch.hf.generate import decoder as decoding
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.testing.tiny_hf.model import tiny_model

SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
TEXTS = [(15,), (17, 18, 19, 13, 12, 11, 14, 21, 22), (20, 21, 22), (15, 30, 31, 32, 33, 34), (40, 41)]
LIMITS = [None, 3, None, 7, 5]
WAYS = {"greedy": Generation(max_new_tokens=9, temperature=0), "beams": Generation(max_new_tokens=5, beams=3)}
NAMES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "qwen3_vl")
GROUPED = set(NAMES) - {"gpt2"}


@pytest.fixture(scope="module", params=NAMES)
def named(request):
    name = request.param
    if name == "qwen3_vl":
        return name, make_qwen(torch.device("cpu"), is_tiny=True)
    return name, build(name, attention="eager" if name == "gemma2" else "sdpa")


class Heads(TorchFunctionMode):
    """Notes the shapes of queries and keys of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Size, torch.Size]] = []

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if function is scaled_dot_product_attention:
            self.seen.append((args[0].shape, args[1].shape))
        return function(*args, **(kwargs or {}))


def old_way(decoder, monkeypatch):
    monkeypatch.setattr(decoding, "grow_in_place", lambda cache: cache)
    return replace(decoder, grouped=())


@torch.inference_mode()
def walk(decoder) -> list[torch.Tensor]:
    """Logits of steps in which rows leave, are named twice and change places."""
    logits, session = decoder.start(make_prompts(TEXTS))
    out = [logits]
    for rows in (None, None, [0, 1, 3, 4], None, [3, 3, 0, 1], [1, 2], None):
        if rows is not None:
            session.select(torch.tensor(rows))
        tokens = torch.arange(16, 16 + (len(rows) if rows else len(out[-1])))
        out.append(session.advance(tokens))
    return out


def test_every_step_gives_the_logits_of_the_old_way(named, monkeypatch):
    name, model = named
    decoder = hf_decoder(model)
    assert bool(decoder.grouped) == (name in GROUPED)
    new = walk(decoder)
    for found, right in zip(new, walk(old_way(decoder, monkeypatch)), strict=True):
        assert (found - right).abs().max() <= 1e-5 * right.abs().max().clamp(min=1)


@pytest.mark.parametrize("way", WAYS)
def test_generated_tokens_are_those_of_the_old_way_and_of_every_prompt_alone(named, way, monkeypatch):
    _, model = named
    ends = range(0, model.get_input_embeddings().num_embeddings, 23)
    decoder = hf_decoder(model, end_ids=ends)

    def tokens(decoder, texts, limits):
        made = generate_tokens(decoder, make_prompts(texts, limits=limits), WAYS[way])
        return collect(made, len(texts))

    together = tokens(decoder, TEXTS, LIMITS)
    assert together == [tokens(decoder, [t], [n])[0] for t, n in zip(TEXTS, LIMITS, strict=True)]
    assert together == tokens(old_way(decoder, monkeypatch), TEXTS, LIMITS)
    assert len({len(c.tokens) for c in together}) > 1


def test_no_step_copies_keys_for_the_query_heads_that_share_them(named):
    name, model = named
    with torch.inference_mode():
        _, session = hf_decoder(model).start(make_prompts(TEXTS))
        with Heads() as heads:
            session.advance(torch.arange(16, 21))
    config = model.config.get_text_config()
    shared = getattr(config, "num_key_value_heads", config.num_attention_heads)
    if name == "gemma2":
        assert heads.seen == []  # a softcap is written out
        return
    assert len(heads.seen) == config.num_hidden_layers
    assert {(query[1], key[1]) for query, key in heads.seen} == {(shared, shared)}


class Layer(nn.Module):
    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 4), keys=st.integers(1, 9), shared=st.integers(1, 3), groups=st.integers(1, 4),
    kind=st.sampled_from(["none", "bool", "float"]), scale=st.sampled_from([None, 0.3]), seed=st.integers(0, 99),
)  # fmt: skip
@torch.no_grad()
def test_one_query_folded_is_what_sdpa_gives(rows, keys, shared, groups, kind, scale, seed):
    torch.manual_seed(seed)
    query = torch.randn(rows, 1, shared * groups, 8).transpose(1, 2)
    key, value = torch.randn(rows, shared, keys, 8), torch.randn(rows, shared, keys, 4)
    first = torch.randint(0, keys, (rows, 1, 1, 1))
    is_allowed = torch.arange(keys) >= first
    masks = {"none": None, "bool": is_allowed, "float": torch.where(is_allowed, 0.0, -torch.inf)}
    found, weights = folded_attention(Layer(groups), query, key, value, masks[kind], scaling=scale)
    right, _ = SDPA(Layer(groups), query, key, value, masks[kind], scaling=scale)
    assert weights is None
    assert found.shape == right.shape
    assert found.is_contiguous()
    assert (found - right).abs().max() < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"queries": 3},
        {"queries": 3, "mask": torch.ones(2, 1, 3, 5, dtype=torch.bool)},
        {"mask": torch.tensor([True, True, False, True, True]).expand(2, 4, 1, 5)},
        {"position_bias": torch.linspace(0, 3, 20).view(1, 4, 1, 5)},
        {"groups": 1},
    ],
)
@torch.no_grad()
def test_everything_else_is_left_to_sdpa(options):
    given = dict(options)
    layer = Layer(given.pop("groups", 2))
    queries, mask = given.pop("queries", 1), given.pop("mask", None)
    torch.manual_seed(0)
    query = torch.randn(2, 4, queries, 8)
    key = torch.randn(2, 4 // layer.num_key_value_groups, 5, 8)
    with Heads() as heads:
        found, _ = folded_attention(layer, query, key, key, mask, **given)
        right, _ = SDPA(layer, query, key, key, mask, **given)
    assert torch.equal(found, right)
    assert heads.seen[0] == heads.seen[1]


def test_only_the_text_part_attends_folded_and_only_while_a_step_runs():
    model = make_qwen(torch.device("cpu"), is_tiny=True)
    during = []
    hook = model.model.language_model.register_forward_hook(
        lambda *_: during.append(
            [c._attn_implementation for c in (model.config.text_config, model.config.vision_config)]
        )
    )
    try:
        walk(hf_decoder(model))
    finally:
        hook.remove()
    assert during[0] == ["sdpa", "sdpa"]
    assert during[1:] == [[NAME, "sdpa"]] * 7
    assert model.config.text_config._attn_implementation == "sdpa"


def test_a_step_that_fails_leaves_the_model_s_own_attention():
    model = build("llama", attention="sdpa")
    with torch.inference_mode():
        _, session = hf_decoder(model).start(make_prompts(TEXTS))
        with pytest.raises(IndexError):
            session.advance(torch.full((len(TEXTS),), 10**6))
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_than_sdpa_stays(monkeypatch):
    model = build("llama", attention="eager")
    decoder = hf_decoder(model)
    with Heads() as heads, attend_folded(decoder.grouped):
        assert model.config._attn_implementation == "eager"
        walk(decoder)
    assert heads.seen == []


def test_two_that_use_one_model_leave_it_as_it_was():
    model = build("llama", attention="sdpa")
    configs = grouped_configs(model)
    one, two = attend_folded(configs), attend_folded(configs)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    two.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_a_decoder_from_another_process_steps_too():
    decoder = hf_decoder(build("llama", attention="sdpa"))
    right = walk(decoder)
    for table in (AttentionInterface, AttentionMaskInterface):
        table._global_mapping.pop(NAME)  # as where nobody has asked for it yet
    for found, expected in zip(walk(pickle.loads(pickle.dumps(decoder))), right, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["falcon", "gpt2"])
def test_models_without_grouped_layers_have_nothing_to_fold(name):
    assert grouped_configs(build(name)) == ()


def test_a_model_whose_code_compares_its_attention_with_sdpa_itself_stays_as_it_is():
    model = tiny_model("deepseek_v32")
    for part in model.modules():
        if hasattr(part, "config"):
            part.num_key_value_groups = 2  # else it would have nothing to fold anyway
    assert grouped_configs(model) == ()
