"""A model judges many samples as it judges each alone: labels, heads and texts, with images, reuse and pinned shapes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import transformers

from tests.scoring.judges import (
    VISION,
    awake,
    make_tokenizer,
    picture,
    picture_questions,
    questions,
    text_judge,
    text_sizes,
)
from tests.tiny import counting_backend
from truebatch.batch.torch_compile import has_compiled_layers, uncompile_layers
from truebatch.errors import ConfigError, LawError, RunError
from truebatch.generation.config import Generation
from truebatch.hf.generate import packed_prefill
from truebatch.scoring.backends.interface import SampleError
from truebatch.scoring.backends.protocol import decode, encode
from truebatch.scoring.backends.transformers import ModelBackend, model_backend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.equality_check import check_identity, pack_report, refuse, unpack_report
from truebatch.scoring.inputs.read_samples import read_requests
from truebatch.scoring.readouts import Generate, Head, Labels, Words, YesNo
from truebatch.scoring.readouts.read_answer import read_answer
from truebatch.scoring.readouts.scale import ANY_NUMBER, Scale
from truebatch.scoring.scorer import Scorer
from truebatch.scoring.store.manifest import settle_manifest
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.testing.tiny_hf.processors import tiny_processor

TEN = Labels({str(n): n for n in range(1, 11)})
TWO = Labels({"a": 1, "b": 0})
TEXT = Generate(Generation(max_new_tokens=6, temperature=0))
DRAWN = Generate(Generation(max_new_tokens=6, temperature=0.9, top_k=50, seed=3))
LIMITS = Limits(cells=4096)
pytestmark = pytest.mark.xdist_group("scoring-models")


@pytest.fixture(scope="module")
def text():
    return text_judge()


@pytest.fixture(scope="module", params=VISION)
def vision(request):
    return VISION[request.param]()


def prepared(backend, data):
    return [backend.prepare(asked) for asked in read_requests(data)]


def plain(answers):
    return [(answer.score, dict(answer.output)) for answer in answers]


def near(one, other, tolerance=2e-5):
    for (score, output), (score_, output_) in zip(one, other, strict=True):
        assert output.keys() == output_.keys()
        assert output.get("text") == output_.get("text")
        assert score == pytest.approx(score_, abs=tolerance) if score is not None else score_ is None
        for label, chance in output.get("probabilities", {}).items():
            assert chance == pytest.approx(output_["probabilities"][label], abs=tolerance)


@pytest.mark.parametrize("readout", [TEN, TEXT, DRAWN], ids=["labels", "greedy", "drawn"])
def test_samples_with_any_images_together_are_judged_as_alone(vision, readout):
    backend = model_backend(*vision, readout, LIMITS, reuse_prefix=False, reuse_images=False)
    asked = prepared(backend, picture_questions(8))
    alone = [plain(backend.judge([one]))[0] for one in asked]
    near(plain(backend.judge(asked)), alone)
    near(plain(backend.judge(asked[::-1]))[::-1], alone)
    assert len({str(one) for one in alone}) > 4


@pytest.mark.parametrize(
    "name", ["llava_next", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llava_onevision", "idefics3"))]
)
def test_images_of_any_number_of_tiles_are_judged_in_full_batches_as_alone(name, monkeypatch):
    model = tiny_model(name, "vision_language")
    backend = model_backend(model, tiny_processor(model), Labels({"a": 1, "b": 0}), LIMITS)
    sizes = [[(40, 24)], [], [(16, 16), (24, 48)], [(64, 16)], [(20, 60), (16, 18)]]
    data = [
        {"id": str(at), "user": "abc "[: at + 1], "images": [picture(at + k, *size) for k, size in enumerate(some)]}
        for at, some in enumerate(sizes)
    ]
    asked = prepared(backend, data)
    alone = [plain(backend.judge([one]))[0] for one in asked]
    judged, calls = backend.model.forward, []
    monkeypatch.setattr(backend.model, "forward", lambda *a, **k: (calls.append(1), judged(*a, **k))[1])
    near(plain(backend.judge(asked)), alone)
    calls.clear()
    backend.judge(asked[:1])
    of_one = len(calls)
    calls.clear()
    near(plain(backend.judge(asked[::-1]))[::-1], alone)
    assert len(calls) <= of_one + 1  # one pass for all, and where packed one for what follows the prompts
    assert len({str(one) for one in alone}) == len(asked)


@pytest.mark.parametrize("readout", [TEN, TEXT], ids=["labels", "texts"])
def test_reuse_of_prefixes_and_images_changes_nothing_in_two_calls_in_a_row(vision, readout):
    off = model_backend(*vision, readout, LIMITS, reuse_prefix=False, reuse_images=False)
    on = model_backend(*vision, readout, replace(LIMITS, level="close"))
    data = picture_questions(8)
    expected = plain(off.judge(prepared(off, data)))
    for _ in range(2):
        near(plain(on.judge(prepared(on, data))), expected)
    assert on.reused()["prefix_tokens"] > 0
    assert on.reused()["images"] > 0
    near(plain(off.judge(prepared(off, data))), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planned_batch_has_the_same_bits_whatever_was_judged_before(vision, dtype):
    """A run that is taken up again begins with any batch; its images may have been in an earlier one."""
    model, processor = vision
    model.to(dtype)
    try:
        backend = model_backend(model, processor, TEN, Limits(level="plan", cells=2048))
        asked = prepared(backend, picture_questions(8))
        batch = [*asked[3:], asked[4]]
        assert len(batch) > 3
        cold = plain(backend.judge(batch))
        reused = backend.reused()["images"]
        backend.judge(asked[:5])
        backend.judge(asked[::-1])
        assert plain(backend.judge(batch)) == cold
        assert reused > 0  # one image of this batch is there twice
    finally:
        model.float()


def test_the_cost_from_headers_is_what_the_processor_makes(vision):
    backend = model_backend(*vision, TEN, LIMITS)
    for asked in read_requests(picture_questions(8)):
        cost = backend.cost(asked)
        assert cost.tokens == len(backend.prepare(asked).ids)
        assert cost.patches > 0 or not asked.images or "llava" in backend.name.lower()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readout", [TEN, TEXT], ids=["labels", "texts"])
def test_pinned_shapes_give_the_same_bits_in_any_company(vision, readout, dtype):
    model, processor = vision
    model.to(dtype)
    try:
        backend = model_backend(model, processor, readout, Limits(level="shape", cells=2048))
        asked = prepared(backend, picture_questions(8))
        alone = [plain(backend.judge([one]))[0] for one in asked]
        for seed in range(3):
            order = random.Random(seed).sample(range(8), 8)
            cut = random.Random(seed).randrange(1, 7)
            found = plain(
                [*backend.judge([asked[n] for n in order[:cut]]), *backend.judge([asked[n] for n in order[cut:]])]
            )
            assert found == [alone[n] for n in order]
    finally:
        model.float()


def test_pinned_shapes_agree_with_the_other_levels(text):
    pinned = model_backend(*text, TEN, Limits(level="shape", cells=1024))
    free = model_backend(*text, TEN, LIMITS)
    data = questions(9)
    near(plain(pinned.judge(prepared(pinned, data))), plain(free.judge(prepared(free, data))))


def test_a_tokenizer_that_pads_right_or_cuts_is_neither_asked_nor_changed(text):
    model, tokenizer = text[0], make_tokenizer()
    tokenizer.padding_side, tokenizer.model_max_length = "right", 8
    one, other = model_backend(*text, TEN, LIMITS), model_backend(model, tokenizer, TEN, LIMITS)
    data = questions(5)
    assert plain(one.judge(prepared(one, data))) == plain(other.judge(prepared(other, data)))
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("right", 8)


def test_label_shares_make_the_score_and_the_mass_is_told(text):
    (answer,) = (backend := model_backend(*text, TEN, LIMITS)).judge(prepared(backend, questions(1)))
    chances = answer.output["probabilities"]
    assert answer.output["mass"] == pytest.approx(sum(chances.values()))
    assert answer.score == pytest.approx(sum(int(k) * p for k, p in chances.items()) / sum(chances.values()))
    (yes,) = (backend := model_backend(*text, YesNo("y", "n"), LIMITS)).judge(prepared(backend, questions(1)))
    assert yes.score == pytest.approx(yes.output["probabilities"]["y"] / yes.output["mass"])
    (word,) = (backend := model_backend(*text, Words(["a", "b", "c"]), LIMITS)).judge(prepared(backend, questions(1)))
    assert 1 <= word.score <= 3
    (best,) = (backend := model_backend(*text, Labels(TEN.values, "likeliest"), LIMITS)).judge(
        prepared(backend, questions(1))
    )
    assert best.score == int(max(chances, key=chances.get))


def test_a_reward_head_gives_one_number_a_sample_as_alone():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**text_sizes(), num_labels=1)
    model = awake(transformers.LlamaForSequenceClassification(config))
    backend = model_backend(model, make_tokenizer(), Head(), LIMITS)
    asked = prepared(backend, questions(7))
    together = backend.judge(asked)
    for one, answer in zip(asked, together, strict=True):
        assert answer.score == pytest.approx(backend.judge([one])[0].score, abs=2e-5)
        bare = model(input_ids=torch.tensor([one.ids])).logits.item()
        assert answer.score == pytest.approx(bare, abs=2e-5)
    assert check_identity(backend, list(read_requests(questions(7)))).ok
    with pytest.raises(ConfigError, match="does not predict next tokens"):
        model_backend(model, make_tokenizer(), TEN, LIMITS)


def test_a_text_without_a_score_is_a_failure_that_keeps_the_text(text):
    backend = model_backend(*text, Generate(TEXT.settings, scale=ANY_NUMBER), LIMITS)
    answers = backend.judge(prepared(backend, questions(6)))
    for answer in answers:
        is_cut = answer.output["ended"] in ("length", "room")
        found = read_answer(answer.output["text"], ANY_NUMBER, is_cut=is_cut)
        assert answer.kind == found.status if found.value is None else answer.score == found.value
    assert any(isinstance(answer, SampleError) for answer in answers)


@pytest.mark.parametrize("level", ["close", "shape"])
def test_a_structured_answer_is_one_of_the_scale_and_the_same_alone_and_together(text, level):
    """The model is random: without the structure it writes anything but a score."""
    readout = Generate(Generation(temperature=0.0, max_new_tokens=40), scale=Scale(), structured="json", step=0.5)
    backend = model_backend(*text, readout, Limits(level=level, cells=512 if level == "shape" else None))
    asked = prepared(backend, questions(6))
    together = backend.judge(asked)
    assert all(answer.output["text"] in readout.choices() and answer.output["ended"] == "stop" for answer in together)
    assert [answer.score for answer in together] == [backend.judge([one])[0].score for one in asked]
    free = model_backend(*text, Generate(readout.settings, scale=Scale()), LIMITS)
    assert all(isinstance(answer, SampleError) for answer in free.judge(prepared(free, questions(6))))


def test_a_structure_that_cannot_be_kept_is_refused_before_anything_is_judged(text):
    short = Generation(temperature=0.0, max_new_tokens=2)
    with pytest.raises(ConfigError, match="longer than an answer may be"):
        model_backend(*text, Generate(short, scale=Scale(), structured="json"), LIMITS)
    with pytest.raises(ConfigError, match="only servers"):
        model_backend(*text, Generate(scale=Scale(), structured="guided_json"), LIMITS)
    for wrong in ({"structured": "json"}, {"scale": ANY_NUMBER, "structured": "json"}, {"structured": "xml"}):
        with pytest.raises(ConfigError, match="struct"):
            Generate(**wrong)
    with pytest.raises(ConfigError, match="larger --step"):
        Generate(scale=Scale(), structured="json", step=1e-6)


def test_what_is_too_long_empty_or_without_its_images_is_told_before_the_model(text):
    backend = model_backend(*text, TEN, LIMITS)
    (long,) = read_requests([{"user": "x" * 3000}])
    with pytest.raises(SampleError, match="positions") as told:
        backend.cost(long)
    assert (told.value.stage, told.value.kind) == ("prepare", "too_long")
    vision = model_backend(*VISION["llava"](), TEN, LIMITS)
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    (missing,) = read_requests([[{"role": "user", "content": parts}]])
    with pytest.raises(SampleError, match="names 1 images and has 0"):
        vision.prepare(missing)


def test_a_sample_may_ask_for_fewer_tokens_and_for_nothing_unknown(text):
    backend = model_backend(*text, TEXT, LIMITS)
    short, whole = questions(2)
    asked = prepared(backend, [{**short, "options": {"max_new_tokens": 2}}, whole])
    answers = backend.judge(asked)
    assert answers[0].tokens == len(asked[0].ids) + 2
    assert answers[1].tokens == len(asked[1].ids) + 6
    for options, kind in (({"temperature": 2}, "unknown_option"), ({"max_new_tokens": 0}, "wrong_option")):
        (sample,) = read_requests([{**short, "options": options}])
        with pytest.raises(SampleError) as told:
            backend.cost(sample)
        assert told.value.kind == kind


def test_many_threads_prepare_with_one_tokenizer_that_was_saved_with_a_cut(text):
    model, tokenizer = text[0], make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    backend = model_backend(model, tokenizer, TEN, LIMITS)
    asked = list(read_requests(questions(40)))
    with ThreadPoolExecutor(8) as pool:
        assert [p.ids for p in pool.map(backend.prepare, asked)] == [backend.prepare(one).ids for one in asked]
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 4


def test_labels_the_tokenizer_cannot_tell_apart_or_merges_are_refused(text):
    with pytest.raises(ConfigError, match="cannot be told"):
        model_backend(*text, Labels({"": 1, "a": 0}), LIMITS)
    with pytest.raises(ConfigError, match="at least two"):
        Labels({"a": 1})


class Broken(transformers.LlamaForCausalLM):
    """A model with one of the faults that batches have."""

    fault = ""
    before = now = 0

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **more):
        is_first = past_key_values is None or past_key_values.get_seq_length() == 0
        call = super().forward
        more |= {"past_key_values": past_key_values}
        if self.fault == "mask":
            return call(input_ids, None, position_ids, **more)
        if self.fault == "right" and is_first:
            order = attention_mask.argsort(dim=1, descending=True, stable=True)
            turned = [one.gather(1, order) for one in (input_ids, attention_mask, position_ids)]
            return call(*turned, **more)
        if self.fault == "stale":
            if is_first:
                self.before, self.now = self.now, int(position_ids.max()) % 5
            else:
                position_ids = position_ids + self.before
        if self.fault == "first row":
            out = call(input_ids, attention_mask, position_ids, **more)
            out.logits = out.logits[:1].expand_as(out.logits)
            return out
        if self.fault == "loop" and is_first:
            rows = range(len(input_ids))
            every = [
                call(input_ids[r : r + 1], attention_mask[r : r + 1], position_ids[r : r + 1], **more) for r in rows
            ]
            every[-1].logits = torch.cat([one.logits for one in every])
            return every[-1]
        return call(input_ids, attention_mask, position_ids, **more)


@pytest.mark.parametrize("readout", [TWO, TEN, TEXT], ids=["labels", "long labels", "texts"])
@pytest.mark.parametrize("fault", ["", "right", "mask", "first row", "loop", "stale"])
def test_the_check_refuses_every_kind_of_broken_batch_and_no_sound_model(fault, readout):
    if (fault == "stale" and readout is TWO) or (fault == "loop" and readout is not TWO):
        pytest.skip("this fault needs a cache" if fault == "stale" else "this loop keeps no cache of all its rows")
    torch.manual_seed(0)
    model = awake(Broken(transformers.LlamaConfig(**text_sizes())))
    model.fault = fault
    backend = model_backend(model, make_tokenizer(), readout, LIMITS, reuse_prefix=False)
    report = check_identity(backend, list(read_requests(questions(9))), n=6)
    assert report.ok == (fault == "")
    assert report.is_loop == (fault == "loop")
    if fault:
        with pytest.raises(LawError, match="gives other results in a batch"):
            refuse(report)


@pytest.mark.parametrize("readout", [TEN, TEXT], ids=["labels", "texts"])
@pytest.mark.parametrize("fault", ["", "right", "mask", "first row", "stale"])
def test_in_bf16_the_check_refuses_what_is_further_from_fp32_than_rounding(fault, readout):
    torch.manual_seed(0)
    model = awake(Broken(transformers.LlamaConfig(**text_sizes()))).bfloat16()
    model.fault = fault
    before = [one.clone() for one in (*model.parameters(), *model.buffers())]
    backend = model_backend(model, make_tokenizer(), readout, LIMITS, reuse_prefix=False)
    report = check_identity(backend, list(read_requests(questions(9))), n=6)
    assert report.ok == (fault == "")
    assert (report.rounding <= 1.1) == (fault == "")
    assert report.max_diff < 0.03 or fault
    after = (*model.parameters(), *model.buffers())
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert unpack_report(decode(encode(pack_report(report)))) == report


def test_a_head_in_bf16_is_compared_with_its_own_rounding():
    torch.manual_seed(0)
    model = awake(transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**text_sizes(), num_labels=1)))
    backend = model_backend(model.bfloat16(), make_tokenizer(), Head(), LIMITS)
    report = check_identity(backend, list(read_requests(questions(7))))
    assert report.ok
    assert report.rounding < 2
    assert "times as far from fp32" in str(report)


def test_without_room_for_fp32_the_check_says_the_tolerance_it_used(monkeypatch):
    model = text_judge()[0].bfloat16()
    backend = model_backend(model, make_tokenizer(), TEN, LIMITS)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelBackend, "probe_in_fp32", full)
    report = check_identity(backend, list(read_requests(questions(5))))
    assert report.rounding is None
    assert "at most 3e-02 is noise" in str(report)


def changes(model, tokenizer):
    """Fourteen things a score depends on; each gives a backend that differs in nothing else."""

    def other_tokenizer(**more):
        made = make_tokenizer()
        for name, value in more.items():
            setattr(made, name, value)
        return made

    def with_token():
        made = make_tokenizer()
        made.add_tokens(["word"])
        return made

    def peft_model():
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(text_judge()[0], peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    eager = text_judge(attn_implementation="eager")[0]
    half = text_judge()[0].bfloat16()
    return {
        "weights": lambda: model_backend(text_judge(seed=1)[0], tokenizer, TEN, LIMITS, name="m"),
        "config": lambda: model_backend(text_judge(rms_norm_eps=1e-3)[0], tokenizer, TEN, LIMITS, name="m"),
        "model": lambda: model_backend(model, tokenizer, TEN, LIMITS, name="other"),
        "adapter": lambda: model_backend(peft_model(), tokenizer, TEN, LIMITS, name="m"),
        "dtype": lambda: model_backend(half, tokenizer, TEN, LIMITS, name="m"),
        "attention": lambda: model_backend(eager, tokenizer, TEN, LIMITS, name="m"),
        "tokenizer": lambda: model_backend(model, with_token(), TEN, LIMITS, name="m"),
        "template": lambda: model_backend(
            model, other_tokenizer(chat_template="{{ messages }}"), TEN, LIMITS, name="m"
        ),
        "readout.values": lambda: model_backend(model, tokenizer, TWO, LIMITS, name="m"),
        "readout.prefix": lambda: model_backend(model, tokenizer, Labels(TEN.values, prefix="{"), LIMITS, name="m"),
        "readout.reduce": lambda: model_backend(model, tokenizer, Labels(TEN.values, "likeliest"), LIMITS, name="m"),
        "readout.settings": lambda: model_backend(model, tokenizer, TEXT, LIMITS, name="m"),
        "reuse.prefix": lambda: model_backend(model, tokenizer, TEN, LIMITS, name="m", reuse_prefix=False),
        "reuse.images": lambda: model_backend(model, tokenizer, TEN, LIMITS, name="m", reuse_images=False),
    }


@pytest.mark.parametrize("field", list(changes(None, None)))
def test_each_of_fourteen_changed_fields_is_refused_by_its_name(tmp_path, text, field):
    settle_manifest(tmp_path, model_backend(*text, TEN, LIMITS, name="m").describe())
    with pytest.raises(RunError) as told:
        settle_manifest(tmp_path, changes(*text)[field]().describe())
    assert f"{field}" in told.value.seen


def test_generation_settings_and_the_image_processor_are_in_the_fingerprint(tmp_path):
    model, processor = VISION["llava"]()
    settle_manifest(tmp_path, model_backend(model, processor, TEXT, LIMITS).describe())
    other = Generate(Generation(max_new_tokens=7, temperature=0))
    with pytest.raises(RunError, match=r"readout\.settings\.max_new_tokens: was 6, now 7"):
        settle_manifest(tmp_path, model_backend(model, processor, other, LIMITS).describe())
    processor.image_processor.size = {"shortest_edge": 60}
    with pytest.raises(RunError, match=r"processor\.settings"):
        settle_manifest(tmp_path, model_backend(model, processor, TEXT, LIMITS).describe())


def test_labels_of_one_token_are_read_in_one_row_and_equal_one_by_one(text, monkeypatch):
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)  # their common beginning would be read once instead
    asked = list(read_requests(questions(9)))
    for level in ("close", "plan"):
        backend = model_backend(*text, TWO, Limits(level=level, cells=4096))
        prepared = [backend.prepare(one) for one in asked]
        alone = [backend.judge([one])[0] for one in prepared]
        together = backend.judge(prepared)
        assert backend.decoder.is_equal, backend.decoder.why
        assert [a.score for a in together] == pytest.approx([a.score for a in alone], abs=1e-5)
        assert check_identity(backend, asked).ok


def test_compiled_layers_read_labels_as_written_ones_do(text, monkeypatch):
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)
    monkeypatch.setattr("truebatch.batch.torch_compile.BACKEND", "eager")
    asked = list(read_requests(questions(9)))
    plain = model_backend(*text, TWO, Limits(cells=4096))
    want = [plain.judge([plain.prepare(one)])[0].score for one in asked]
    compiled = model_backend(*text, TWO, Limits(cells=1024), compiled=True)
    try:
        found = [one.score for one in compiled.judge([compiled.prepare(one) for one in asked])]
    finally:
        uncompile_layers(compiled.model)
    assert compiled.decoder.is_equal, compiled.decoder.why
    assert found == pytest.approx(want, abs=1e-5)
    assert compiled.describe()["reuse"]["compiled"]


def test_layers_compiled_for_one_backend_run_as_written_for_another_and_after_it(text, monkeypatch):
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)
    graphs, count = counting_backend()
    monkeypatch.setattr("truebatch.batch.torch_compile.BACKEND", count)
    model = text[0]
    asked = list(read_requests(questions(6)))
    want = [model_backend(*text, TEXT, Limits(cells=4096)).judge([one])[0] for one in _prepared(text, asked)]
    compiled = model_backend(*text, TWO, Limits(cells=1024), compiled=True)
    try:
        other = model_backend(*text, TEXT, Limits(cells=4096))
        for some in (slice(0, 6), slice(1, 4), slice(2, 6)):
            assert other.judge(_prepared(text, asked)[some]) == want[some]
        assert other.decoder.is_equal, other.decoder.why
        assert not graphs
    finally:
        compiled.close()
    assert not has_compiled_layers(model)


def _prepared(text, asked):
    backend = model_backend(*text, TEXT, Limits(cells=4096))
    return [backend.prepare(one) for one in asked]


def test_what_is_not_compiled_is_refused(text):
    with pytest.raises(ConfigError, match="only the prefill of packed prompts"):
        model_backend(*text, TWO, Limits(cells=1024, level="shape"), compiled=True)


def test_compiled_layers_read_prompts_of_texts_as_written_ones_do(text, monkeypatch):
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)
    monkeypatch.setattr("truebatch.batch.torch_compile.BACKEND", "eager")
    asked = list(read_requests(questions(6)))
    plain = model_backend(*text, TEXT, Limits(cells=4096))
    want = [plain.judge([one])[0] for one in _prepared(text, asked)]
    compiled = model_backend(*text, TEXT, Limits(cells=1024), compiled=True)
    try:
        found = compiled.judge([compiled.prepare(one) for one in asked])
    finally:
        compiled.close()
    assert compiled.decoder.is_equal, compiled.decoder.why
    assert found == want


def test_compiled_layers_without_an_operator_that_notes_keys_say_so(text, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)
    monkeypatch.setattr("truebatch.batch.torch_compile.BACKEND", "eager")
    monkeypatch.setattr("truebatch.attention.api.can_attend_on_host", lambda *_: False)
    backend = model_backend(*text, TEXT, Limits(cells=1024), compiled=True)
    try:
        with pytest.raises(ConfigError, match="do not return keys for generation"):
            backend.judge([backend.prepare(one) for one in read_requests(questions(3))])
    finally:
        uncompile_layers(backend.model)
        torch.compiler.reset()  # nobody else gets what was compiled here


def test_a_run_says_which_quick_way_its_model_does_not_allow_and_why(text, monkeypatch, tmp_path):
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)
    run = Scorer(model_backend(*text, TWO, Limits(cells=4096))).score(questions(5), tmp_path / "quick")
    assert run.slower == ()
    monkeypatch.setattr(packed_prefill, "are_close", lambda *_: False)
    slow = Scorer(model_backend(*text, TWO, Limits(cells=4096))).score(questions(5), tmp_path / "slow")
    (line,) = slow.slower
    assert line.startswith("prompts are read in padded rows: logits of packed rows are ")
    assert slow.scores == pytest.approx(run.scores, abs=1e-5)


def test_windows_say_it_once_and_what_a_model_cannot_try_has_its_reason(text, monkeypatch, tmp_path):
    monkeypatch.setattr(packed_prefill, "PREFIX_SHARE", 2.0)
    monkeypatch.setattr(packed_prefill, "are_close", lambda *_: False)
    run = Scorer(model_backend(*text, TWO, Limits(cells=4096))).score(questions(5), tmp_path / "run", window=2)
    assert len(run.slower) == 1
    model, tokenizer = text
    model.set_attn_implementation("eager")
    try:
        lines = model_backend(model, tokenizer, TWO, Limits(cells=4096)).slower_ways()
    finally:
        model.set_attn_implementation("sdpa")
    assert lines == ["prompts are read in padded rows: its attention is eager, not sdpa"]


def test_a_beginning_that_is_read_for_each_prompt_has_its_reason():
    angles = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    backend = model_backend(*text_judge(rope_parameters=angles), TWO, Limits(cells=4096))
    backend.judge(prepared(backend, [{"user": "the same beginning of all " * 4 + end} for end in ("a", "b", "c")]))
    reason = "the angles of its positions follow the length of a row"
    assert backend.slower_ways() == [
        f"prompts are read in padded rows: {reason}",
        f"what prompts begin with in common is read for each of them: {reason}",
    ]
