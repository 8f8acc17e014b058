"""The lines that are typed: what each is called, what it needs, how it must end.

Words in braces are filled in (`WORDS`), so that a tiny round types the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TRAIN = "train hf --model llama --data texts.jsonl --task causal_lm --log-format plain"
STEPS = "--set train.samples_per_step={samples} --set train.max_steps={steps}"
KEPT = f"{TRAIN} {STEPS} --set train.save_every=2 --set train.layout=packed --set train.cells=4096"
"""A run with checkpoints; layout and budget are given, so that nothing is measured in a run that is to be killed."""
SCORE = "score prompts.jsonl --model qwen3"
LABELS = "--labels w1=1,w2=2,w3=3"
BACKBONE = (
    "--set backbone_settings.name=runs/vlm_backbone/run/model --set 'backbone_settings.prompt=\"{images} {question}\"'"
)
REWARD = "--set evaluation.output_dir=runs/reward"
SMALL = "--set generator.stays=60 --set model.embedding_dim=48 --set model.reduced_dim=32 --set model.latent_dim=32"
WORDS = {
    "tiny": {"{samples}": "16", "{steps}": "6", "{few}": "2", "{seqset_vae}": SMALL},
    "full": {"{samples}": "256", "{steps}": "12", "{few}": "6", "{seqset_vae}": "--set generator.stays=200"},
}
"""What fills the words in braces of a line, in a tiny round and in a full one; `{device}` is the one asked for."""
DONE, ON, SCORED = "done:", " on {device}", " 0 failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A command as it is typed in the folder of the models, without the name of the program."""

    name: str
    command: str
    after: tuple[str, ...] = ()
    """Lines that must have ended rightly before."""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped, and that is said."""
    code: int = 0
    """How it must end."""
    stop: Literal["", "kill", "term"] = ""
    """Stop it with this signal once `begun` is there, look at its exit code, and type the same line again."""
    begun: str = "checkpoints/*/manifest.json"
    """A file of the run's folder that says that there is something to resume."""
    like: str = ""
    """A run that was not stopped, whose last loss this one's must be."""
    says: tuple[str, ...] = ()
    """What must appear in its output."""
    is_for_gpu: bool = False
    """Typed on a GPU only."""
    is_pytest: bool = False
    """`python -m pytest` in the repository, instead of truebatch."""
    limit: float = 120.0
    """Seconds."""


def make_lines(*, is_gpu: bool) -> list[Line]:
    """All lines, the longest chains first."""
    found = [*_systems(), *_training(), *_scoring(), *_machine()]
    return [line for line in found if is_gpu or not line.is_for_gpu]


def _machine() -> list[Line]:
    plan = "plan texts.jsonl --field text --tokenizer llama --cells 4096 --samples-per-step {samples}"
    return [
        Line(name="env", command="env"),
        Line(name="doctor", command="doctor"),
        Line(name="plan", command=plan),
        Line(name="verify a folder", command="verify llama --quick", says=("EQUAL",), limit=180),
        Line(
            name="GPU tests", needs=("pytest", "hypothesis"), is_for_gpu=True, is_pytest=True, limit=300,
            command="-m gpu -q -p no:cacheprovider -o addopts= -o filterwarnings=default",
        ),
    ]  # fmt: skip


def _training() -> list[Line]:
    short = f"{TRAIN} {STEPS}"
    default, kept, lora = "train hf, default", "train hf, kept", "train hf, LoRA"
    says = (ON, DONE)
    fit = (
        "fit hf --model llama --data texts.jsonl --task causal_lm --set train.samples_per_step={samples} --out runs/fit"
    )
    checkpointing = f"{short} --set train.gradient_checkpointing=true --out runs/layers"
    compiled = f"{short} --out runs/compiled --set train.compile=true"
    return [
        Line(name="train hf, compiled", command=compiled, is_for_gpu=True, says=says, limit=300),
        Line(name=default, command=f"{short} --validation held_out.jsonl --out runs/default", says=says, limit=200),
        Line(name=kept, command=f"{KEPT} --out runs/kept", says=says),
        *[
            Line(name=f"train hf, resumed after {what}", command=f"{KEPT} --out runs/{stop}", stop=stop, after=(kept,),
                 like="runs/kept", says=says)
            for stop, what in (("kill", "SIGKILL"), ("term", "SIGTERM"))
        ],
        Line(name="fit", command=fit, says=("next:",), limit=200),
        Line(name=lora, command=f"{short} --lora --out runs/lora", needs=("peft",), says=says, limit=200),
        Line(name="train hf, checkpointing", command=checkpointing, says=says, limit=200),
        Line(name="train hf, dry run", command=f"{short} --out runs/dry --dry-run"),
        Line(name="evaluate", command="evaluate runs/default", after=(default,)),
        Line(name="generate", command="generate runs/default --prompt w1 --prompt w2 --max-new-tokens 16", after=(default,)),
        Line(name="generate, LoRA", command="generate runs/lora --prompt w1 --max-new-tokens 16", after=(lora,)),
        Line(name="verify a run", command="verify runs/default/model --layout packed --quick", after=(default,),
             says=("EQUAL",), limit=180),
        Line(name="report", command="report runs/default runs/kept --out runs/compared.html", after=(default, kept)),
    ]  # fmt: skip


def _scoring() -> list[Line]:
    labels, says = "score, labels", (SCORED,)
    pictures = "score pictures.jsonl --model vlm"
    typed = {
        "labels, compiled": f"{SCORE} {LABELS} --compile --out runs/labels_compiled",
        "labels": f"{SCORE} {LABELS} --out runs/labels --export runs/labels.csv",
        "texts": f"{SCORE} --generate --max-new-tokens 16 --out runs/texts",
        "level shape": f"{SCORE} {LABELS} --level shape --out runs/shape",
        "one by one": f"{SCORE} {LABELS} --true-batch off --out runs/alone",
        "a reward model": "score prompts.jsonl --model reward --head --out runs/head",
        "images": f"{pictures} --yesno --out runs/pictures",
        "texts about images": f"{pictures} --generate --max-new-tokens 8 --out runs/picture_texts",
        "in a worker": f"{SCORE} {LABELS} --workers 1 --out runs/worker",
    }
    return [
        *[
            Line(name=f"score, {name}", command=command, says=says, is_for_gpu="--compile" in command, limit=200)
            for name, command in typed.items()
        ],
        Line(name="score, labels again", command=f"{SCORE} {LABELS} --out runs/labels_again", after=(labels,), says=says),
        Line(name="score, resumed after SIGKILL", command=f"{SCORE} {LABELS} --rows 2 --out runs/killed_scores", stop="kill",
             begun="journal/*", says=says),
        Line(name="run status", command="run status runs/labels", after=(labels,)),
        Line(name="run export", command="run export runs/labels --to runs/labels.jsonl", after=(labels,)),
        Line(name="report of scores", command="report runs/labels", after=(labels,)),
    ]  # fmt: skip


def _systems() -> list[Line]:
    """Each of the five, by its own commands."""
    steps = "--set train.max_steps={few} --log-format plain"
    pretrain, judged = "vlm_pruning: pretrain", "vl_reward: run"
    stitched = f"train stitched_llm --set donor_steps=20 --set made_up_samples=600 {steps}"
    reward = "vl_reward run --set reward_model.type=tiny --set reward_model.params.readout=expected"
    test_batch = "seqset_vae test-batch --batch-size 1 --batch-size 8 {seqset_vae}"
    generated = ("evaluate", "generate", "report")
    return [
        Line(name="demo", command="demo", limit=180),
        *_stages("stitched_llm", stitched, generated, limit=240),
        Line(name=pretrain, command="vlm_pruning pretrain --epochs 1 --out runs/vlm_backbone", limit=240),
        *_stages("vlm_pruning", f"train vlm_pruning {BACKBONE} {steps}", ("evaluate", "show", "report"), after=(pretrain,)),
        *_stages("chinese_gpt", f"train chinese_gpt {steps}", generated),
        *_stages("seqset_vae", f"train seqset_vae {{seqset_vae}} {steps}", ("evaluate", "report")),
        Line(name="seqset_vae: test-batch", command=test_batch),
        Line(name=judged, command=f"{reward} {REWARD}", says=("Failures: 0.0%",)),
        Line(name="vl_reward: gallery", command=f"vl_reward gallery {REWARD}", after=(judged,)),
        Line(name="vl_reward: status", command="run status runs/reward", after=(judged,), says=(SCORED,)),
        *[
            Line(name=f"{name}: verify", command=f"verify {name} --quick", says=("EQUAL",), limit=180)
            for name in ("chinese_gpt", "seqset_vae")
        ],
    ]  # fmt: skip


def _stages(
    system: str, train: str, then: tuple[str, ...], *, after: tuple[str, ...] = (), limit: float = 180.0
) -> list[Line]:
    """Train, then what a trained run is used for."""
    name, run = f"{system}: train", f"runs/{system}"
    typed = {"generate": f"generate {run} --prompt hello --max-new-tokens 8"}
    return [
        Line(name=name, command=f"{train} --out {run}", after=after, limit=limit, says=(ON, DONE)),
        *[
            Line(name=f"{system}: {one}", command=typed.get(one, f"{one} {run}"), after=(name,), limit=limit)
            for one in then
        ],
    ]
