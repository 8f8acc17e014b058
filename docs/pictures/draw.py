"""The two pictures of docs/architecture.md as SVG, in English and Chinese: `python docs/pictures/draw.py`.

Each picture is a way: a file of the library beside what it does, and on the arrow to the next what is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
SUFFIXES = {"en": ".svg", "zh": ".zh-CN.svg"}
WIDTH, BOX, GAP, MARGIN = 760, 52, 34, 20
FONT = "font-family='Helvetica, Arial, PingFang SC, Microsoft YaHei, Noto Sans CJK SC, sans-serif'"
MONO = "font-family='Menlo, Consolas, DejaVu Sans Mono, monospace'"


@dataclass(frozen=True, slots=True)
class Station:
    """A file that a sample or a prompt comes through."""

    file: str
    """Under src/truebatch."""
    does: dict[str, str]
    gives: dict[str, str]
    """What is handed on to the next station."""


def station(file: str, does: str, does_zh: str, gives: str, gives_zh: str) -> Station:
    """A station with its words in both languages."""
    return Station(file, {"en": does, "zh": does_zh}, {"en": gives, "zh": gives_zh})


SAMPLE = (
    station("planning/lengths/measure.py", "measures every sample once, without a tensor", "逐个测量样本一次，不建张量",
            "lengths, costs, counts", "长度、开销、计数"),
    station("planning/plan.py", "decides who shares a step, a micro-batch and a row", "决定哪些样本同一步、同一微批、同一行",
            "Plan: ids of every row", "Plan：每一行的样本编号"),
    station("data/loader.py", "reads the samples of a step ahead, in workers", "由工作进程提前读取一步的样本",
            "samples and their rows", "样本和它们所在的行"),
    station("batch/collate.py", "writes samples into padded or packed rows", "把样本写入填充行或打包行",
            "MicroBatch on the device", "设备上的 MicroBatch"),
    station("attention/api.py", "lets the model attend inside each sample only", "模型的注意力只在各样本内部",
            "logits of every cell", "每个单元格的 logits"),
    station("objective.py", "gives each loss term as a sum and a count", "每项损失给出总和与计数",
            "sums of the micro-batch", "微批的总和"),
    station("training/step.py", "adds micro-batches and ranks, divides once, updates", "累加各微批和各进程，只除一次，然后更新",
            "StepOutcome: loss, gradient norms", "StepOutcome：损失、梯度范数"),
    station("training/trainer.py", "skips or rolls back what is not finite, makes the record", "跳过或回退非有限值，生成记录",
            "one record", "一条记录"),
    station("training/logging/metrics_jsonl.py", "appends one line, in step with the checkpoints", "追加一行，与检查点保持一致",
            "metrics.jsonl", "metrics.jsonl"),
)  # fmt: skip
PROMPT = (
    station("scoring/inputs/read_samples.py", "reads lines; a broken one is a record", "逐行读取；读不了的行也是一条记录",
            "ScoreRequest", "ScoreRequest"),
    station("scoring/store/input_index.py", "names samples by content, in order", "按内容给每个样本命名，保留顺序",
            "Listed: place, id, key", "Listed：位置、编号、键"),
    station("scoring/batch_plan.py", "batches by what samples really cost, longest first", "按真实开销组批，最长的在先",
            "batches, frozen in plan.json", "批次，固定在 plan.json 中"),
    station("scoring/resume.py", "leaves out what the journal already holds", "略过日志中已有的样本",
            "what is left", "剩下的样本"),
    station("scoring/prefetch.py", "decodes images and applies the chat template in threads", "在线程中解码图像、套用对话模板",
            "token ids and pixels", "词元编号和像素"),
    station("scoring/backends/transformers.py", "runs one batch of prompts", "运行一批提示",
            "log-probabilities", "对数概率"),
    station("hf/generate/decoder.py", "steps rows token by token, each as if alone", "逐词元推进各行，如同单独运行",
            "texts or label scores", "文本或标签得分"),
    station("scoring/bisect.py", "halves a batch that failed until one sample is named", "把失败的批次对半切，直到找出那个样本",
            "Outcome: a score or a failure", "Outcome：得分或失败"),
    station("scoring/store/journal.py", "commits batch and outcomes together, in SQLite", "把批次和结果一起提交到 SQLite",
            "journal of the run", "运行的日志"),
    station("scoring/store/export.py", "writes one row for every input line, in order", "按顺序为每条输入写一行",
            "scores.jsonl, .csv, .parquet", "scores.jsonl、.csv、.parquet"),
)  # fmt: skip
STARTS = {
    "sample": {"en": "train.jsonl", "zh": "train.jsonl"},
    "prompt": {"en": "prompts.jsonl", "zh": "prompts.jsonl"},
}
WAYS = {"sample": SAMPLE, "prompt": PROMPT}


def draw(stations: Sequence[Station], start: str, language: str) -> str:
    """A column of boxes with arrows between them."""
    parts, top = [_text(MARGIN + 28, MARGIN + 14, start, MONO, weight="bold")], MARGIN + 24
    for one in stations:
        parts += [_arrow(top), _box(one, top + GAP, language)]
        top += GAP + BOX
        parts.append(_text(MARGIN + 60, top + GAP / 2 + 5, one.gives[language], FONT, fill="#555", size=13))
    parts.append(_arrow(top))
    height = top + GAP + MARGIN
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' width='{WIDTH}' height='{height:g}'>"
    )
    return "\n".join([head, f"<rect width='{WIDTH}' height='{height:g}' fill='#fff'/>", *parts, "</svg>"]) + "\n"


def _box(one: Station, top: float, language: str) -> str:
    return "\n".join([
        f"<rect x='{MARGIN}' y='{top:g}' width='{WIDTH - 2 * MARGIN}' height='{BOX}' rx='6' fill='#eef3fa' stroke='#4a6fa5'/>",
        _text(MARGIN + 14, top + 21, one.file, MONO, weight="bold"),
        _text(MARGIN + 14, top + 41, one.does[language], FONT),
    ])  # fmt: skip


def _arrow(top: float) -> str:
    x, end = MARGIN + 40, top + GAP
    line = f"<line x1='{x}' y1='{top + 2:g}' x2='{x}' y2='{end - 7:g}' stroke='#4a6fa5' stroke-width='2'/>"
    return f"{line}<path d='M{x - 5} {end - 8:g}h10l-5 8z' fill='#4a6fa5'/>"


def _text(
    x: float, y: float, text: str, font: str, *, fill: str = "#111", size: int = 14, weight: str = "normal"
) -> str:
    return f"<text x='{x:g}' y='{y:g}' {font} font-size='{size}' font-weight='{weight}' fill='{fill}'>{escape(text)}</text>"


def pictures() -> dict[str, str]:
    """Every picture by the name of its file."""
    return {
        f"{name}{suffix}": draw(stations, STARTS[name][language], language)
        for name, stations in WAYS.items()
        for language, suffix in SUFFIXES.items()
    }


if __name__ == "__main__":
    for file, text in pictures().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
