"""Tiny models with tokenizers and processors made in memory, and samples to judge."""

from __future__ import annotations

import random

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from truebatch.testing.tiny_hf.model import randomize_zero_init

SPECIAL = (
    "<pad>",
    "<s>",
    "</s>",
    "<image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<video>",
    "<|im_start|>",
    "<|im_end|>",
)
PAD, BOS, EOS, IMAGE = range(4)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(image="<image>"):
    """A byte-level tokenizer: every digit is a token, so that 10 begins with the token of 1."""
    vocab = {token: at for at, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    return made


def text_sizes(**more):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "max_position_embeddings": 1024}
    return {**sizes, "num_key_value_heads": 2, "vocab_size": 300, **ids, **more}


def awake(model, seed=0):
    torch.manual_seed(seed)
    randomize_zero_init(model)
    return model.float().eval()


def text_model(seed=0, **more):
    torch.manual_seed(seed)
    return awake(transformers.LlamaForCausalLM(transformers.LlamaConfig(**text_sizes(**more))), seed)


def text_judge(seed=0, **more):
    return text_model(seed, **more), make_tokenizer()


def _qwen(config, model, vision, text):
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 14}
    made = config(
        vision_config={**sizes, "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        text_config=text_sizes(**text), image_token_id=IMAGE, video_token_id=6, vision_start_token_id=4,
        vision_end_token_id=5,
    )  # fmt: skip
    return awake(model(made))


def _qwen_processor(kind):
    tokenizer = make_tokenizer("<|vision_start|><image><|vision_end|>")
    tokenizer.image_token, tokenizer.image_token_id = "<image>", IMAGE
    tokenizer.video_token, tokenizer.video_token_id = "<video>", 6
    images = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    )
    made = kind.__new__(kind)
    # The video processor needs torchvision, and no sample here has a video.
    made.image_processor, made.tokenizer, made.video_processor = images, tokenizer, None
    made.chat_template = tokenizer.chat_template
    made.image_token, made.video_token, made.image_token_id, made.video_token_id = "<image>", "<video>", IMAGE, 6
    made.image_ids, made.video_ids = [IMAGE], [6]
    return made


def qwen3_vl():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    model = _qwen(
        transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration,
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {"rope_parameters": rope, "head_dim": 8},
    )  # fmt: skip
    return model, _qwen_processor(transformers.Qwen3VLProcessor)


def qwen2_5_vl():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    model = _qwen(
        transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration,
        {"window_size": 56, "fullatt_block_indexes": [1]}, {"rope_parameters": rope},
    )  # fmt: skip
    return model, _qwen_processor(transformers.Qwen2_5_VLProcessor)


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56, patch_size=14
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**text_sizes()), image_token_index=IMAGE,
        vision_feature_layer=-2, vision_feature_select_strategy="default",
    )  # fmt: skip
    tokenizer = make_tokenizer()
    images = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        image_token="<image>", chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return awake(transformers.LlavaForConditionalGeneration(config)), processor


VISION = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl, "llava": llava}


def questions(number, seed=0, system="You judge. Be fair and say what you see in one word, please."):
    draw = random.Random(seed)
    return [
        {"id": f"q{n}", "system": system, "user": f"{n}: " + "".join(draw.choices("abc de", k=draw.randrange(1, 90)))}
        for n in range(number)
    ]


def picture(seed, width, height):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def picture_questions(number, seed=0):
    """No image, one or two, of many sizes; every third question has an image that was there before."""
    draw = random.Random(seed)
    out = []
    for n, one in enumerate(questions(number, seed)):
        seeds = [[], [n], [n, n + 1], [1]][n % 4]
        sizes = [(28 + 13 * (s % 5), 28 + 17 * (s % 4)) for s in seeds]
        out.append({**one, "images": [picture(s, *size) for s, size in zip(seeds, sizes, strict=True)]})
    draw.shuffle(out)
    return out
