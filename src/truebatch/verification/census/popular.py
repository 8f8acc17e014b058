"""Architectures by how much they are used, most first: what `truebatch census --top N` examines.

A kept list and no measurement: it is read, not computed, so that two people who type the same command examine the
same models. Names that the installed transformers does not have are left out and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Named = tuple[str, str]
"""The head and the architecture (`model_type`)."""

_LINES = """
causal_lm: llama qwen2 qwen3 qwen3_5_text mistral gemma3_text gpt_oss gemma4_text
masked_lm: bert roberta modernbert distilbert xlm-roberta
vision_language: qwen2_5_vl qwen3_vl llava internvl gemma3 qwen3_5 qwen2_vl gemma4
seq2seq: t5 bart marian mt5
causal_lm: gpt2 gemma2 phi3 deepseek_v3 qwen3_moe mixtral qwen3_next gemma qwen2_moe deepseek_v32 glm4_moe glm_moe_dsa
causal_lm: deepseek_v2 qwen3_5_moe_text glm4 phi minimax minimax_m2 kimi_linear falcon_h1 nemotron_h mamba2 mamba jamba lfm2
masked_lm: deberta-v2 deberta electra albert mpnet camembert
vision_language: llava_next llava_onevision paligemma idefics3 smolvlm mistral3 glm4v qwen3_vl_moe gemma3n
seq2seq: pegasus mbart m2m_100 umt5 switch_transformers t5gemma led
causal_lm: glm glm4_moe_lite llama4_text opt bloom falcon gpt_neox gptj gpt_neo codegen cohere cohere2 olmo2 olmo3 olmo olmoe
causal_lm: granite granitemoe granitemoehybrid lfm2_moe bamba zamba2 zamba falcon_mamba recurrent_gemma rwkv xlstm
causal_lm: starcoder2 stablelm exaone4 smollm3 ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe seed_oss dots1
masked_lm: mobilebert convbert fnet longformer big_bird nystromformer esm ernie xlm xlm-roberta-xl rembert roformer eurobert
vision_language: qwen3_5_moe gemma4_unified glm46v glm4v_moe aya_vision cohere2_vision idefics2 got_ocr2 ovis2
vision_language: video_llava vipllava llava_next_video janus emu3 chameleon aria deepseek_vl fuyu git llama4
vision_language: kosmos-2 blip-2 mllama
seq2seq: bigbird_pegasus blenderbot blenderbot-small longt5 nllb-moe plbart prophetnet mvp fsmt encoder-decoder pegasus_x
causal_lm: gpt_bigcode mpt biogpt xglm openai-gpt ctrl persimmon phimoe jetmoe dbrx bitnet apertus arcee helium nemotron doge
causal_lm: diffllama olmo_hybrid cwm flex_olmo longcat_flash gemma3n_text ministral3 ministral vaultgemma gpt_neox_japanese
causal_lm: axk1 kolibri1 laguna hy_v3 jais2 deepseek_v4 afmoe exaone_moe solar_open youtu qwen4_exp_text bailing_hybrid
masked_lm: flaubert squeezebert ibert megatron-bert luke layoutlm tapas mra yoso data2vec-text nomic_bert
vision_language: fast_vlm perception_lm lighton_ocr exaone4_5 granite4_vision glm_ocr hunyuan_vl paddleocr_vl lfm2_vl florence2
seq2seq: seamless_m4t seamless_m4t_v2 t5gemma2
causal_lm: megatron-bert bert roberta gpt-sw3 whisper trocr
speech_seq2seq: whisper speech_to_text moonshine
speech_ctc: wav2vec2 hubert wavlm parakeet_ctc
image_and_text: clip siglip siglip2 chinese_clip
audio_classification: wav2vec2 audio-spectrogram-transformer whisper
audio_language: qwen2_audio voxtral qwen3_asr
time_series: timesfm patchtst
"""


def popular_names() -> tuple[Named, ...]:
    """The whole list, each name once, the most used first."""
    found: dict[Named, None] = {}
    for line in _LINES.strip().splitlines():
        head, names = line.split(":")
        found |= dict.fromkeys((head, name) for name in names.split())
    return tuple(found)


def most_used(number: int, known: Mapping[str, Collection[str]]) -> list[Named]:
    """The first `number` names of the list that the installed transformers has, by head."""
    return [(head, name) for head, name in popular_names() if name in known.get(head, ())][:number]
