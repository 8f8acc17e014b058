"""`verify` and `assert_batchable`: one question, asked of a model, a system or any two functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, overload

from torch import nn

from truebatch.batch.fields import Field
from truebatch.errors import ConfigError, LawError
from truebatch.objective import Objective
from truebatch.training.system import ConfigT, System, Task, settings_type, settled
from truebatch.verification.bits.prove import prove_bits
from truebatch.verification.compare import Whole
from truebatch.verification.config import VerifyConfig
from truebatch.verification.determinism import Mode, quieted
from truebatch.verification.engines.api import Against, verify_against
from truebatch.verification.engines.report import AgainstReport
from truebatch.verification.report import VerifyReport
from truebatch.verification.runner import prove
from truebatch.verification.subjects.function_subject import ListSubject, run_one_by_one
from truebatch.verification.subjects.subject import Subject, callable_subject, find_module, model_subject

Samples = Sequence[Any]


@overload
def verify(
    subject: Any,
    objective: Objective | Samples | None = None,
    samples: Samples | None = None,
    fields: Sequence[Field] | None = None,
    *,
    one: Callable[[Any], Any] | None = None,
    model: nn.Module | None = None,
    config: VerifyConfig | None = None,
    against: None = None,
) -> VerifyReport: ...


@overload
def verify(
    subject: Any,
    objective: Objective | Samples | None = None,
    samples: Samples | None = None,
    fields: Sequence[Field] | None = None,
    *,
    config: VerifyConfig | None = None,
    against: Against,
) -> AgainstReport: ...


def verify(
    subject: Any,
    objective: Objective | Samples | None = None,
    samples: Samples | None = None,
    fields: Sequence[Field] | None = None,
    *,
    one: Callable[[Any], Any] | None = None,
    model: nn.Module | None = None,
    config: VerifyConfig | None = None,
    against: Against | None = None,
) -> VerifyReport | AgainstReport:
    """Prove that a batch equals one by one, or name where it does not.

    verify(model, objective, samples, fields)     a model of your own and its loss
    verify(hf_model, samples)                     a Hugging Face model; samples are lists of token ids, or dicts
    verify(function, samples=..., fields=...)     any callable from a micro-batch to per-sample outputs
    verify(batched, one=single, samples=...)      your batched function against your original one-sample function
    verify(system)                                a System with its own samples and default settings (`verify_system`)

    verify(model, ..., against="compile")         one engine against another: `compile`, a dtype, `attn:sdpa`, `int8`,
                                                  `merged`, another model, a folder, a server's address or `Server`

    `model` names the model a function works with, where it cannot be found from the function.

    Nothing of the model is changed: modes, buffers and gradients are put back. The report's `ok` is True only if every
    arrangement that ran gave equal outputs, loss and gradients.

    >>> import torch
    >>> from truebatch import verify
    >>> samples = [torch.ones(n) for n in (3, 1, 6, 2)]
    >>> def padded_mean(many):
    ...     return [row.mean() for row in torch.nn.utils.rnn.pad_sequence(many, batch_first=True)]
    >>> verify(padded_mean, one=lambda x: x.mean(), samples=samples).verdict
    'broken'
    """
    settings = config or VerifyConfig()
    _refuse_bits(settings, against=against, one=one)
    if against is not None:
        if one is not None or model is not None or isinstance(subject, System):
            raise _not_against(subject, one)
        subject_of = _subject_against(subject, objective, samples, fields, settings)
        return verify_against(subject_of, against, settings)
    if isinstance(subject, System):
        _check_alone(subject, objective=objective, samples=samples, fields=fields, one=one, model=model)
        return verify_system(subject, config=settings)
    if objective is not None and not isinstance(objective, Objective):
        objective, samples = None, objective if samples is None else samples
    if samples is None:
        raise _no_samples(subject)
    if one is not None:
        return _verify_functions(subject, one, list(samples), fields, model, settings)
    return _judge(_subject(subject, objective, list(samples), fields, settings, model), settings)


def _refuse_bits(config: VerifyConfig, *, against: Against | None, one: Callable[[Any], Any] | None) -> None:
    if config.exactness != "bits":
        return
    if against is not None:
        raise ConfigError(
            "two engines are compared up to rounding", seen="against=..., exactness='bits'", do="leave one of them out"
        )
    if one is not None:
        raise ConfigError(
            "your one-sample function has other bits than a batch, rightly",
            seen="one=..., exactness='bits'",
            do="leave one of them out",
        )


def _judge(subject: Subject | ListSubject, config: VerifyConfig) -> VerifyReport:
    return prove_bits(subject, config) if config.exactness == "bits" else prove(subject, config)


def _subject_against(
    subject: Any, objective: Any, samples: Samples | None, fields: Sequence[Field] | None, config: VerifyConfig
) -> Subject | ListSubject:
    """The subject of two engines; a Hugging Face model has samples of its own if none are given."""
    if objective is not None and not isinstance(objective, Objective):
        objective, samples = None, objective if samples is None else samples
    if samples is None and _is_hf_model(subject):
        samples = import_module("truebatch.verification.subjects.hf_subject").random_samples(subject)
    if samples is None:
        raise _no_samples(subject)
    return _subject(subject, objective, list(samples), fields, config, None)


def _not_against(subject: Any, one: Any) -> ConfigError:
    seen = "a system" if isinstance(subject, System) else "one=..." if one is not None else "model=..."
    return ConfigError(
        "`against` compares two engines of a model",
        seen=f"against with {seen}",
        do="pass the model itself, with its objective, samples and fields if it is your own",
    )


def _no_samples(subject: Any) -> ConfigError:
    return ConfigError(
        "verify needs samples",
        seen=f"verify({type(subject).__name__}) without samples",
        do="pass about eight samples of different lengths as `samples`",
    )


def verify_system(
    system: System[ConfigT], settings: ConfigT | None = None, *, config: VerifyConfig | None = None
) -> VerifyReport:
    """Prove it for a system on a few of its own samples, from the shortest to one of median length.

    `settings` is an instance of `settings_type(system)`, by default with every default.
    """
    return verify_task(system.prepare(settled(system, settings or settings_type(system)())), config=config)


def verify_task(task: Task, *, model: nn.Module | None = None, config: VerifyConfig | None = None) -> VerifyReport:
    """The same for a task that is prepared; `model` is a trained one, by default a new one."""
    asked = config or VerifyConfig()
    data = task.measured_data()
    assert data.measured is not None
    subject = model_subject(
        task.build_model() if model is None else model,
        task.objective,
        [data.samples[i] for i in _spread(data.measured.lengths.tolist())],
        data.fields,
        asked.causal,
    )
    return _judge(subject, asked)


def assert_batchable(*args: Any, **kwargs: Any) -> VerifyReport:
    """`verify` for a test suite: raises LawError with the whole report if the law is broken or could not be proven.

    >>> import torch
    >>> from truebatch import assert_batchable
    >>> model = torch.nn.Linear(4, 2)
    >>> samples = [torch.randn(n, 4) for n in (3, 1, 6, 2)]
    >>> report = assert_batchable(lambda many: [model(x) for x in many], one=model, samples=samples)
    >>> report.verdict
    'equal'
    """
    if kwargs.get("against") is not None:
        raise ConfigError(
            "assert_batchable compares a batch with one by one",
            seen="against=...",
            do="compare two engines with verify(..., against=...), and assert its `ok`",
        )
    report: VerifyReport = verify(*args, **{**kwargs, "against": None})
    if report.ok:
        return report
    wrong = "a sample's result depends on what else is in its micro-batch" if report.is_broken else "nothing was proven"
    fix = report.causes[0].fix if report.causes else "read the report above; verify(...) returns it as a value"
    raise LawError(wrong, seen=str(report), do=fix)


def _subject(
    subject: Any,
    objective: Any,
    samples: list[Any],
    fields: Sequence[Field] | None,
    config: VerifyConfig,
    model: nn.Module | None,
) -> Subject | ListSubject:
    if objective is not None:
        if not isinstance(subject, nn.Module) or fields is None:
            raise ConfigError(
                "an objective goes with a model and its fields",
                seen=f"subject {type(subject).__name__}, fields={fields!r:.40}",
                do="call verify(model, objective, samples, fields)",
            )
        return model_subject(subject, objective, samples, fields, config.causal)
    if fields is not None:
        return callable_subject(subject, samples, fields, config.causal, model)
    if _is_hf_model(subject):
        hf = import_module(
            "truebatch.verification.subjects.hf_subject"
        )  # transformers takes seconds to import: only when it is needed
        return hf.hf_subject(subject, samples)  # type: ignore[no-any-return]
    if isinstance(subject, nn.Module) or not callable(subject):
        raise ConfigError(
            "verify does not know how to call this",
            seen=f"{type(subject).__module__}.{type(subject).__name__}",
            do="pass `fields` so that it gets micro-batches, or a function over a list of samples",
        )
    return ListSubject(samples, subject, model if model is not None else find_module(subject))


def _is_hf_model(subject: Any) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(subject).__mro__)


def _verify_functions(
    batched: Any,
    one: Callable[[Any], Any],
    samples: list[Any],
    fields: Sequence[Field] | None,
    model: nn.Module | None,
    config: VerifyConfig,
) -> VerifyReport:
    found = next((m for m in (model, find_module(batched), find_module(one)) if m is not None), None)

    def original(mode: Mode, singles: Whole, samples: Samples) -> Whole:
        with quieted(found, mode):
            return run_one_by_one(one, samples, found, batched=singles, stand_in=fields is not None)

    if fields is None:
        return prove(ListSubject(samples, batched, found), config, original=original)
    return prove(callable_subject(batched, samples, fields, config.causal, found), config, original=original)


def _check_alone(system: System[Any], **given: object) -> None:
    """A system brings everything along; what is given beside it would be ignored."""
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigError(
            f"the system {system.name!r} has its own samples, fields and loss",
            seen=f"{', '.join(named)} given beside it",
            do="leave them out, or pass its model, objective, samples and fields yourself instead of the system",
        )


def _spread(lengths: list[int], number: int = 8) -> list[int]:
    """Samples from the shortest to the median, so that the proof sees padding and does not take long."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    order = order[: max(number, (len(order) + 1) // 2)]
    if len(order) <= number:
        return order
    return [order[round(k * (len(order) - 1) / (number - 1))] for k in range(number)]
