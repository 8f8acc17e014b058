"""The gallery of failures, docs/failures.md and its Chinese twin: `python docs/pages/failures.py` types every command.

examples/failures/*.py -> `truebatch verify` of each failure and of the mended one, in both languages -> two pages
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from truebatch.cli.app import run

ROOT = Path(__file__).parents[2]
FOLDER = "examples/failures"
PAGES = {"en": ROOT / "docs/failures.md", "zh": ROOT / "docs/failures.zh-CN.md"}
BEGINNINGS = (
    "BROKEN", "EQUAL", "DIFFERENT", "first difference", "leak", "likely cause", "  do:",
    "不成立", "相等", "不同", "相同", "第一处差异", "泄漏", "可能的原因", "  怎么办",
)  # fmt: skip
"""How the lines begin that are shown, beside the first arrangement that differs; of the leaks only the first is."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure, the code that has it, and where the public met its kind."""

    file: str
    name: str
    issue: str
    title: dict[str, str]
    story: dict[str, str]
    options: str = ""
    changed: tuple[str, str] = ("", "")
    """What is compared in the picture of the change; by default the two functions of this name."""

    def command(self, *, mended: bool = False) -> str:
        """What a user types."""
        suffix = "_mended" if mended else ""
        if self.file == "engines":
            return f"truebatch verify {FOLDER}/engines.py:trained --against {FOLDER}/engines.py:{self.name}{suffix}"
        return f"truebatch verify {FOLDER}/{self.file}.py:{self.name}{suffix}{self.options}"

    @property
    def link(self) -> str:
        """`owner/name#12` as a link; GitHub leads from an issue to a pull request of that number by itself."""
        repository, _, number = self.issue.partition("#")
        return f"[{repository} #{number}](https://github.com/{repository}/issues/{number})"


def failure(
    place: str, issue: str, title: tuple[str, str], story: tuple[str, str], *, options: str = "", changed: str = ""
) -> Failure:
    """A failure with its words in both languages; `changed` names two classes, wrong and right."""
    file, _, name = place.partition(":")
    wrong, _, right = changed.partition(" -> ")
    both = [dict(zip(PAGES, words, strict=True)) for words in (title, story)]
    return Failure(file, name, issue, both[0], both[1], options, (wrong, right))


FAILURES = (
    failure(
        "attention:no_mask", "EleutherAI/lm-evaluation-harness#3055",
        ("Attention sees the padding", "注意力看见了填充"),
        ("A score depends on the batch size, because an encoder is given rows and no mask.",
         "分数随批大小而变：编码器拿到了补齐的行，却没有拿到掩码。"),
        changed="NoMask.mix -> Layer.mix",
    ),
    failure(
        "packed_transformers:all_ones_mask", "huggingface/transformers#46634",
        ("A packed row with a mask of ones", "打包的行，加一个全 `1` 的掩码"),
        ("The tokenizer's mask is passed beside position ids that begin again. With it the positions are not looked at, and "
         "a Llama reads the whole row as one text.",
         "位置编号在每个样本处重新开始，同时又传了分词器的掩码。有了掩码，位置就不再起作用，Llama 把整行读成一篇文本。"),
    ),
    failure(
        "packed_transformers:cache_in_training", "huggingface/alignment-handbook#204",
        ("A packed row with the cache left on", "打包的行，缓存没有关"),
        ("Does packing keep samples apart? In the Trainer, which switches the cache off, it does. In a loop of one's own the "
         "same call leaks: `use_cache` is on by default.",
         "打包会让样本互相看见吗？Trainer 关掉了缓存，所以不会；自己写的循环里，同样的调用就会：`use_cache` 默认是开的。"),
    ),
    failure(
        "packed_transformers:positions_alone", "MeetKai/functionary#132",
        ("A model that never hands its positions on", "从不传递位置的模型"),
        ("Packing without FlashAttention: the positions begin again in every sample, and OPT, like many other "
         "architectures, makes its mask without them.",
         "不用 FlashAttention 的打包：位置在每个样本处重新开始，但 OPT 和许多架构一样，生成掩码时根本不看位置。"),
    ),
    failure(
        "packed_transformers:state_over_borders", "modelscope/ms-swift#4439",
        ("A state that runs on into the next sample", "状态流进了下一个样本"),
        ("A run got worse after padding-free was turned on. In a recurrent or convolutional layer no mask can help: the state "
         "of Mamba crosses the border. truebatch runs such layers on the rows of their samples.",
         "打开 padding-free 之后结果变差。对递归层和卷积层，掩码无济于事：Mamba 的状态越过了样本的边界。"
         "truebatch 让这样的层逐个样本成行地运行。"),
    ),
    failure(
        "attention:two_dimensional_mask", "EleutherAI/bergson#227",
        ("A tokenizer's mask for decoder layers", "把分词器的掩码交给解码器层"),
        ("Layers are called directly with a mask [B, L]. Two samples crash; one sample runs, and is silently not causal.",
         "直接调用各层，并传入形状为 [B, L] 的掩码。两个样本会报错；一个样本能跑，却悄悄失去了因果性。"),
        options=" --layout right", changed="Stitched.mask -> StitchedIn4D.mask",
    ),
    failure(
        "attention:no_positions", "huggingface/transformers#22707",
        ("Left padding without positions", "左侧填充，却没有位置"),
        ("Texts of a batch differ from texts one by one although padding is on the left: positions are counted from the "
         "start of the row.",
         "填充明明在左侧，整批生成的文本仍与逐个生成的不同：位置是从行首数起的。"),
        options=" --layout left",
    ),
    failure(
        "pooling:last_cell", "allenai/reward-bench#137",
        ("A reward read from the last cell of a row", "从行尾的单元格读奖励"),
        ("The accuracy of a reward model changes with the batch size: the last cell of a short text is padding.",
         "奖励模型的准确率随批大小而变：短文本的最后一格是填充。"),
        changed="Reward.pool -> OwnLastToken.pool",
    ),
    failure(
        "pooling:mean_over_padding", "TIGER-AI-Lab/VLM2Vec#124",
        ("An embedding that is a mean over padding", "嵌入把填充也平均了进去"),
        ("An embedding alone and the same one in a batch are two different vectors.",
         "同一个样本，单独算和放在批次里算，得到两个不同的向量。"),
        changed="Embedding.pool -> OwnMean.pool",
    ),
    failure(
        "pooling:batch_statistics", "pytorch/pytorch#70529",
        ("Batch normalisation over padded rows", "对补齐的行做批归一化"),
        ("Mean and variance are taken over padding and neighbours, while training as well as in the running statistics.",
         "均值和方差把填充和邻居都算了进去，训练时如此，滑动统计量里也如此。"),
        changed="BatchNormalised -> LayerNormalised",
    ),
    failure(
        "losses:mean_of_means", "axolotl-ai-cloud/axolotl#3196",
        ("A mean of means", "平均值的平均值"),
        ("The loss differs with the batch size at equal effective batch size: each micro-batch is averaged by itself, so a "
         "token of a short text weighs more.",
         "有效批大小相同，损失却随批大小而变：每个微批各自求平均，短文本里的词元权重就更大。"),
        changed="MeanOfMeans.sums -> TokenLoss.sums",
    ),
    failure(
        "losses:divided_by_cells", "pytorch/torchtitan#2318",
        ("A loss divided by cells", "损失除以单元格数"),
        ("The sum is right and its divisor counts padding, so the gradient shrinks with the width of the rows.",
         "总和没有错，除数却数了填充，于是行越宽，梯度越小。"),
        changed="DividedByCells.counts -> TokenLoss.counts",
    ),
    failure(
        "losses:loss_of_a_head", "huggingface/transformers#47688",
        ("The loss of a head, accumulated", "累加分类头自己给的损失"),
        ("A head for token classification averages over its micro-batch; accumulated over a step that is a mean of means. "
         "Take its logits, and divide once.",
         "词元分类头在自己的微批内求平均；累加到一步，就成了平均值的平均值。应当取 logits，只除一次。"),
        changed="LossOfTheHead.sums -> SumOfTheHead.sums",
    ),
    failure(
        "losses:labels_over_borders", "modelscope/ms-swift#4736",
        ("Labels shifted over a border", "标签移过了样本边界"),
        ("Attention is kept inside each sample, and still the last token of one sample is trained to predict the first of "
         "the next.",
         "注意力已经限制在各样本之内，但前一个样本的最后一个词元仍被训练去预测下一个样本的第一个。"),
        changed="ShiftedOverTheRow.sums -> TokenLoss.sums",
    ),
    failure(
        "experts:balance_with_padding", "NVIDIA/Megatron-LM#2121",
        ("Padding counts for the balance of experts", "专家均衡把填充也算了进去"),
        ("The balancing loss averages the router over all cells, padding included.",
         "均衡损失对路由的所有单元格求平均，填充也在其中。"),
        changed="BalanceWithPadding.penalty -> Balance.penalty",
    ),
    failure(
        "experts:balance_of_a_batch", "pytorch/torchtitan#4594",
        ("A balance taken over whatever shares the row", "均衡是对同一行的样本一起算的"),
        ("A packed row is treated as one text, so the penalty of a sample depends on its neighbours.",
         "打包的行被当成一篇文本，一个样本的惩罚于是取决于它的邻居。"),
        changed="BalanceOfRows.penalty -> Balance.penalty",
    ),
    failure(
        "images:images_out_of_order", "EvolvingLMMs-Lab/lmms-eval#970",
        ("Images in another order than their texts", "图像与文本的顺序不一致"),
        ("Reported of Qwen2-VL: 0.763 on OCRBench at batch size 1, and 0.605 at 2. Here samples are sorted by length, and "
         "their images are not.",
         "有人报告 Qwen2-VL 的 OCRBench 在批大小为 1 时是 0.763，为 2 时是 0.605。这里的样本按长度排了序，图像却没有跟着排。"),
        changed="SortedByLength.arranged -> Captioner.arranged",
    ),
    failure(
        "images:first_image_for_all", "EvolvingLMMs-Lab/lmms-eval#648",
        ("Every text gets the first image", "所有文本都用了第一张图像"),
        ("Accuracy falls as the batch grows, because images are mixed between samples.",
         "批越大，准确率越低，因为样本之间的图像混在了一起。"),
        changed="FirstImage.arranged -> Captioner.arranged",
    ),
    failure(
        "images:precision_by_shape", "unslothai/unsloth#9708",
        ("Another precision for several rows", "多行时换了精度"),
        ("A kernel is chosen by the number of rows and rounds differently, so greedy texts part. Here a cast stands for it.",
         "按行数选择的内核舍入不同，贪心解码的文本因此分岔。这里用一次类型转换代替那个内核。"),
        changed="PrecisionByShape.joined -> Captioner.joined",
    ),
    failure(
        "engines:served", "RL-Align/RL-Kernel#83",
        ("An engine that serves other numbers", "推理引擎算出了别的数"),
        ("The trainer and the inference engine disagree, and somebody asks for the first operator where they part.",
         "训练器和推理引擎的结果不一致，有人想知道它们最先在哪个算子上分开。"),
    ),
)  # fmt: skip


def source_of(file: Path, dotted: str) -> list[str]:
    """The lines of a function, a class, or a method of a class."""
    text = file.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in dotted.split("."):
        node = next(one for one in node.body if getattr(one, "name", "") == part)
    return _without_indent(text.splitlines()[node.lineno - 1 : node.end_lineno])


def _without_indent(lines: list[str]) -> list[str]:
    indent = min(len(line) - len(line.lstrip()) for line in lines if line)
    return [line[indent:] for line in lines]


def change(one: Failure) -> list[str]:
    """The lines of the fix, as a difference."""
    file = ROOT / FOLDER / f"{one.file}.py"
    wrong, right = one.changed if one.changed[0] else (one.name, f"{one.name}_mended")
    lines = list(difflib.ndiff(source_of(file, wrong), source_of(file, right)))
    kept = [line.rstrip() for line in lines if not line.startswith("?")]
    kept = [line for line in kept if not _is_name(line)]
    last = max(at for at, line in enumerate(kept) if line[:1] in ("+", "-"))
    return kept[: last + 1]


def _is_name(line: str) -> bool:
    """The first line of a function or a class says its name, which differs and is no fix."""
    return line[:1] in "+-" and line[2:].startswith(("def ", "class "))


@contextmanager
def _language(name: str) -> Iterator[None]:
    earlier, width = os.environ.get("TRUEBATCH_LANG"), os.environ.get("COLUMNS")
    os.environ.update(TRUEBATCH_LANG=name, COLUMNS="400")
    try:
        yield
    finally:
        for variable, value in (("TRUEBATCH_LANG", earlier), ("COLUMNS", width)):
            os.environ.pop(variable)
            if value is not None:
                os.environ[variable] = value


def typed(command: str, language: str) -> list[str]:
    """What the command says, in its own words: verdict, first arrangement that differs, module, leak, cause, fix."""
    held = io.StringIO()
    words = [str(ROOT / word) if word.startswith(FOLDER) else word for word in command.split()[1:]]
    with _language(language), redirect_stdout(held):
        run(words)
    said = held.getvalue().replace(f"{ROOT}/", "").splitlines()
    differs = [re.sub(" {3,}", "  ", line) for line in said if line.startswith(("  x  ", "  !  "))]
    counts = [line for line in differs if "--layout left" in command or not line.startswith(LEFT)]
    shown = [line for line in said if line.startswith(BEGINNINGS)]
    leaks = [line for line in shown if line.startswith(("leak", "泄漏"))][1:]
    kept = [shown[0], *counts[:1], *(line for line in shown[1:] if line not in leaks)]
    return [piece for line in kept for piece in wrapped(line)]


LEFT = ("  x  left padded", "  x  左补齐")
"""An arrangement that differs and does not count, unless it is asked for."""
COLUMNS = 116


def wrapped(line: str) -> list[str]:
    """A line that an editor shows whole: broken at a space, or in Chinese after a sign."""
    found, indent = [], ""
    while cell_len(indent + line) > COLUMNS:
        at = max(end for end in _breaks(line) if cell_len(indent + line[:end]) <= COLUMNS)
        found.append((indent + line[:at]).rstrip())
        line, indent = line[at:].lstrip(), "    "
    return [*found, indent + line]


def _breaks(line: str) -> list[int]:
    return [
        match.end()
        for match in re.finditer(r"(?<=\S) (?=\S)|[，。；：、]|(?<=[^\x00-\x7f])(?=[^\x00-\x7f，。；：、）])", line)
    ]


def entry(number: int, one: Failure, language: str) -> str:
    """One failure: story, command and its words, the fix, and the line that proves it."""
    words = WORDS[language]
    told = [f"$ {one.command()}", *typed(one.command(), language)]
    proof = [f"$ {one.command(mended=True)}", typed(one.command(mended=True), language)[0]]
    blocks = [("text", told), ("diff", change(one)), ("text", proof)]
    shown = ["\n".join([f"```{kind}", *(line.rstrip() for line in lines), "```"]) for kind, lines in blocks]
    story = "\n".join(wrapped(one.story[language])).replace("\n    ", "\n")
    head = f"## {number}. {one.title[language]}\n\n{story}\n{words['kind']}{one.link}{words['stop']}"
    return "\n\n".join([head, shown[0], words["fix"], shown[1], shown[2]])


WORDS = {
    "en": {"kind": "A public report of the kind: ", "stop": ".", "fix": "The fix, and the line that proves it:"},
    "zh": {"kind": "公开的报告：", "stop": "。", "fix": "修法，以及证明它的那一行："},
}
HEADS = {
    "en": """\
# Gallery of failures

Twenty ways in which a batch changes a result without an error, each with the words of `truebatch verify` and with the
change that mends it. [中文](failures.zh-CN.md)

The code is in `examples/failures`: small models that fail in the way that is named, four of them the models of
transformers themselves. The issue behind each is a public report of that kind of failure; the code is not theirs, and
the cause there may be another. `python docs/pages/failures.py` types every command again and writes this page.""",
    "zh": """\
# 故障集

批次不报错却改变结果的二十种方式：每一种都附上 `truebatch verify` 的原话，以及改好它的那几行。[English](failures.md)

代码在 `examples/failures`：一些按所说的方式出错的小模型，其中四个就是 transformers 自己的模型。每条后面的链接是这一类故障的
公开报告；代码不是他们的，那里的原因也可能不同。`python docs/pages/failures.py` 会重新运行每条命令并写出本页。""",
}


def page(language: str) -> str:
    """The whole page."""
    entries = [entry(number, one, language) for number, one in enumerate(FAILURES, 1)]
    return "\n\n".join([HEADS[language], *entries]) + "\n"


if __name__ == "__main__":
    for language, file in PAGES.items():
        file.write_text(page(language), encoding="utf-8")
