"""Dialogues of 用户 and 助手: which parts of a sample are asked and which are learned."""

from __future__ import annotations

import re
from dataclasses import dataclass

USER, ASSISTANT = "用户：", "助手："
_TURNS = re.compile(r"(用户[：:]|助手[：:])")


@dataclass(frozen=True, slots=True)
class DialogueSpan:
    """A piece of a sample, end to end with the next."""

    text: str
    is_learned: bool
    """False for questions and cues: they are read, and cost nothing when they are not foreseen."""


def is_dialogue(text: str) -> bool:
    """Whether a text is a dialogue: a turn of 用户 first, and an answer of 助手."""
    text = text.lstrip()
    return text.startswith(("用户：", "用户:")) and ("助手：" in text or "助手:" in text)


def parts_of(text: str, *, mask_prompt: bool = True) -> list[DialogueSpan]:
    """A text in parts; joined, they are the text. Only the answers of a dialogue are learned, a statement wholly."""
    if not mask_prompt or not is_dialogue(text):
        return [DialogueSpan(text, True)]
    parts: list[DialogueSpan] = []
    is_answer = False
    for piece in filter(None, _TURNS.split(text)):
        is_cue = _TURNS.fullmatch(piece) is not None
        is_answer = piece.startswith("助手") if is_cue else is_answer
        parts.append(DialogueSpan(piece, is_answer and not is_cue))
    return parts


def prompt_of(question: str) -> str:
    """What generation gets for a question: the words that stood before every answer in training."""
    return f"{USER}{question}{ASSISTANT}"


def question_and_answer(text: str) -> tuple[str, str]:
    """A dialogue as the text before its last answer, cue included, and that answer."""
    cue = max(text.rfind("助手："), text.rfind("助手:")) + len(ASSISTANT)
    return text[:cue], text[cue:].strip()
