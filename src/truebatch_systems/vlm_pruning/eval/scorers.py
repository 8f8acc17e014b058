"""Who says whether an answer is right: one rule a benchmark, from a prediction and a sample to a score from 0 to 1.

prediction, sample -> score;   all predictions of a benchmark -> its figures (F1, yes ratio, accuracy+, circular)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truebatch.errors import ConfigError, DataError
from truebatch.io.text_encoding import nearest
from truebatch_systems.vlm_pruning.eval.answers import chosen_option, option_number, plain_words, vqa_words, yes_or_no

Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """One prediction with its score."""

    sample: Sample
    prediction: str
    score: float


Rule = Callable[[str, Sample], float]
Figures = Callable[[Sequence[Judged]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class AnswerScorer:
    """The rule of a benchmark, and the figures it has beside the mean score."""

    name: str
    rule: Rule
    figures: Figures

    def __call__(self, prediction: str, sample: Sample) -> float:
        """The score of one prediction, from 0 to 1."""
        return self.rule(prediction, sample)


def mean_score(judged: Sequence[Judged]) -> float:
    """The mean over samples, never over batches of them; 0 without samples."""
    return sum(one.score for one in judged) / len(judged) if judged else 0.0


def _references(sample: Sample) -> list[str]:
    found = [str(one) for one in sample.get("answers") or ()]
    return found or [str(_answer(sample))]


def _answer(sample: Sample) -> Any:
    answer = sample.get("answer")
    if answer is None:
        raise DataError(
            f"sample {str(sample.get('id', '?'))!r} has no answer to judge by",
            seen=f"keys {sorted(sample)}",
            do="give it an answer, or leave it out of the evaluation",
        )
    return answer


def _exact(prediction: str, sample: Sample) -> float:
    """Any of the answers, word for word."""
    said = plain_words(prediction)
    return float(bool(said) and said in {plain_words(one) for one in _references(sample)})


def _vqav2(prediction: str, sample: Sample) -> float:
    """min(humans who agree / 3, 1), averaged over all ways to leave one human out.

    Prediction and human answers are always put in the words of the VQA evaluation; its own script does so only where
    the humans differ, and expects predictions that were put in them before.
    """
    said = vqa_words(prediction)
    agree = [vqa_words(human) == said for human in _references(sample)]
    if not said:
        return 0.0
    if len(agree) == 1:
        return float(agree[0])
    total = sum(agree)
    return sum(min((total - one) / 3, 1.0) for one in agree) / len(agree)


def _gqa(prediction: str, sample: Sample) -> float:
    """The answer, word for word."""
    said = plain_words(prediction)
    return float(bool(said) and said == plain_words(str(_answer(sample))))


def _yes_no(prediction: str, sample: Sample) -> float:
    """yes or no in whole words; a prediction that says neither is wrong."""
    return float(yes_or_no(prediction) == _yes_no_reference(sample))


def _yes_no_reference(sample: Sample) -> str:
    found = yes_or_no(str(_answer(sample)))
    if found is None:
        raise DataError(
            f"sample {str(sample.get('id', '?'))!r} is judged by yes and no, and its answer is neither",
            seen=f"answer={sample['answer']!r}",
            do="give it the answer yes or no, or another judge",
        )
    return found


def _option(prediction: str, sample: Sample, *, is_numbered: bool = False) -> float:
    """The option the prediction names is the right one."""
    options = [str(one) for one in sample.get("choices") or ()]
    right = option_number(_answer(sample), options)
    if right is None or right >= (len(options) or 8):
        raise DataError(
            f"the answer of sample {str(sample.get('id', '?'))!r} is none of its choices",
            seen=f"answer={sample['answer']!r}, choices={options}",
            do="give the letter, the number from 0, or the words of one choice",
        )
    return float(chosen_option(prediction, options, is_numbered=is_numbered) == right)


def _numbered_option(prediction: str, sample: Sample) -> float:
    return _option(prediction, sample, is_numbered=True)


def _no_more(judged: Sequence[Judged]) -> dict[str, float]:
    return {}


def _pope_figures(judged: Sequence[Judged]) -> dict[str, float]:
    """Precision, recall and F1 of `yes`, the share of yes, and of predictions that say neither."""
    pairs = Counter((yes_or_no(one.prediction), _yes_no_reference(one.sample)) for one in judged)
    right, said, true = pairs["yes", "yes"], _total(pairs, 0), _total(pairs, 1)
    precision, recall = right / max(said, 1), right / max(true, 1)
    unclear = pairs[None, "yes"] + pairs[None, "no"]
    number = max(len(judged), 1)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if right else 0.0,
        "yes_ratio": said / number,
        "unclear_ratio": unclear / number,
    }


def _total(pairs: Counter[tuple[str | None, str]], side: int) -> int:
    return sum(count for pair, count in pairs.items() if pair[side] == "yes")


def _mme_figures(judged: Sequence[Judged]) -> dict[str, float]:
    """Accuracy and accuracy+ (all questions of an image right), added up in points over categories."""
    found: dict[str, float] = {}
    for category, ones in _by(judged, lambda one: str(one.sample.get("category", ""))).items():
        images = _by(ones, _image_key).values()
        plus = sum(all(one.score == 1 for one in image) for image in images) / len(images)
        found[f"score_{category}"] = 100 * (mean_score(ones) + plus)
    images = _by(judged, lambda one: (one.sample.get("category"), _image_key(one))).values()
    found["accuracy_plus"] = sum(all(one.score == 1 for one in image) for image in images) / max(len(images), 1)
    return {"score": sum(value for name, value in found.items() if name.startswith("score_")), **found}


def _circular_figures(judged: Sequence[Judged]) -> dict[str, float]:
    """MMBench asks a question again with its options moved on: right only if every time. `group` says what belongs."""
    groups = _by(judged, lambda one: one.sample.get("group", one.sample.get("id"))).values()
    return {"circular_accuracy": sum(all(one.score == 1 for one in group) for group in groups) / max(len(groups), 1)}


def _image_key(one: Judged) -> Any:
    return one.sample.get("image_id", str(one.sample.get("image")))


def _by(judged: Sequence[Judged], key: Callable[[Judged], Any]) -> dict[Any, list[Judged]]:
    found: dict[Any, list[Judged]] = defaultdict(list)
    for one in judged:
        found[key(one)].append(one)
    return found


def by_category(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """What was judged, by category in the order of their names."""
    return dict(sorted(_by(judged, lambda one: str(one.sample.get("category") or "-")).items()))


JUDGES = {
    judge.name: judge
    for judge in (
        AnswerScorer("exact", _exact, _no_more),
        AnswerScorer("vqav2", _vqav2, _no_more),
        AnswerScorer("gqa", _gqa, _no_more),
        AnswerScorer("pope", _yes_no, _pope_figures),
        AnswerScorer("mme", _yes_no, _mme_figures),
        AnswerScorer("mmbench", _option, _circular_figures),
        AnswerScorer("scienceqa", _numbered_option, _no_more),
        AnswerScorer("seed", _option, _no_more),
    )
}


def find_judge(name: str) -> AnswerScorer:
    """A judge by name; a name that is not known is refused with the nearest."""
    if name not in JUDGES:
        raise ConfigError(
            f"there is no judge of this name{nearest(name, list(JUDGES))}",
            seen=repr(name),
            do=f"one of {', '.join(JUDGES)}",
        )
    return JUDGES[name]


def judge_of(samples: Sequence[Sample]) -> AnswerScorer:
    """The judge all samples name (`judge`), or `exact`; a dataset has one."""
    names = {str(sample.get("judge") or "exact") for sample in samples}
    if len(names) > 1:
        raise DataError(
            "samples of one evaluation name different judges", seen=", ".join(sorted(names)), do="evaluate them apart"
        )
    return find_judge(names.pop() if names else "exact")
