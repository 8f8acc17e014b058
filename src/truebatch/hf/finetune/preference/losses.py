"""Losses of a pair: what the model and its reference say of two answers -> one number each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from truebatch.hf.finetune.preference.config import PreferenceConfig


@dataclass(frozen=True, slots=True, eq=False)
class PairValues:
    """[N, 2] each: of the chosen answer, and of the rejected one."""

    log_probs: Tensor
    """Of the answers' tokens, summed."""
    reference: Tensor
    """The same under the reference; 0 for a loss without one."""
    tokens: Tensor
    """How many there are."""

    @property
    def rewards(self) -> Tensor:
        """How much more likely an answer has become."""
        return self.log_probs - self.reference

    @property
    def margin(self) -> Tensor:
        """[N] by how much more the chosen answer than the rejected one."""
        return self.rewards[:, 0] - self.rewards[:, 1]


Rule = Callable[[PairValues, PreferenceConfig], Tensor]


def pair_losses(values: PairValues, config: PreferenceConfig) -> Tensor:
    """[N] the loss of each pair."""
    return _RULES[config.loss_type](values, config)


def _sigmoid(values: PairValues, config: PreferenceConfig) -> Tensor:
    return -logsigmoid(config.beta * values.margin)


def _hinge(values: PairValues, config: PreferenceConfig) -> Tensor:
    return torch.relu(1 - config.beta * values.margin)


def _ipo(values: PairValues, config: PreferenceConfig) -> Tensor:
    mean = values.rewards / values.tokens
    return (mean[:, 0] - mean[:, 1] - 1 / (2 * config.beta)).square()


def _robust(values: PairValues, config: PreferenceConfig) -> Tensor:
    wrong, scaled = config.label_smoothing, config.beta * values.margin
    return (-(1 - wrong) * logsigmoid(scaled) + wrong * logsigmoid(-scaled)) / (1 - 2 * wrong)


def _exo(values: PairValues, config: PreferenceConfig) -> Tensor:
    wrong, scaled = torch.tensor(config.label_smoothing, dtype=torch.float64), config.beta * values.margin
    found = torch.sigmoid(scaled) * (logsigmoid(scaled) - torch.log1p(-wrong).item())
    return found + torch.sigmoid(-scaled) * (logsigmoid(-scaled) - torch.log(wrong).item())


def _nca(values: PairValues, config: PreferenceConfig) -> Tensor:
    scaled = config.beta * values.rewards
    return -logsigmoid(scaled[:, 0]) - 0.5 * logsigmoid(-scaled).sum(1)


def _bco(values: PairValues, config: PreferenceConfig) -> Tensor:
    scaled = config.beta * values.rewards
    return -logsigmoid(scaled[:, 0]) - logsigmoid(-scaled[:, 1])


def _sppo(values: PairValues, config: PreferenceConfig) -> Tensor:
    aim = 0.5 / config.beta
    return (values.rewards[:, 0] - aim).square() + (values.rewards[:, 1] + aim).square()


def _apo_zero(values: PairValues, config: PreferenceConfig) -> Tensor:
    scaled = config.beta * values.rewards
    return 1 - torch.sigmoid(scaled[:, 0]) + torch.sigmoid(scaled[:, 1])


def _apo_down(values: PairValues, config: PreferenceConfig) -> Tensor:
    return torch.sigmoid(config.beta * values.rewards[:, 0]) + 1 - torch.sigmoid(config.beta * values.margin)


def _discopop(values: PairValues, config: PreferenceConfig) -> Tensor:
    scaled = config.beta * values.margin
    blend = torch.sigmoid(scaled / config.discopop_tau)
    return -logsigmoid(scaled) * (1 - blend) + torch.exp(-scaled) * blend


def _sigmoid_norm(values: PairValues, config: PreferenceConfig) -> Tensor:
    mean = values.rewards / values.tokens
    return -logsigmoid(config.beta * (mean[:, 0] - mean[:, 1]))


def _simpo(values: PairValues, config: PreferenceConfig) -> Tensor:
    mean = values.log_probs / values.tokens
    return -logsigmoid(config.beta * (mean[:, 0] - mean[:, 1]) - config.simpo_gamma)


def _orpo(values: PairValues, config: PreferenceConfig) -> Tensor:
    """How much better the odds of the chosen answer are, a token of it taken for the whole."""
    mean = values.log_probs / values.tokens
    odds = mean - torch.log(-torch.expm1(mean))
    return -config.beta * logsigmoid(odds[:, 0] - odds[:, 1])


_RULES: Mapping[str, Rule] = {
    "sigmoid": _sigmoid, "hinge": _hinge, "ipo": _ipo, "robust": _robust, "exo_pair": _exo, "nca_pair": _nca,
    "bco_pair": _bco, "sppo_hard": _sppo, "apo_zero": _apo_zero, "apo_down": _apo_down, "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm, "simpo": _simpo, "cpo": _sigmoid, "orpo": _orpo,
}  # fmt: skip
