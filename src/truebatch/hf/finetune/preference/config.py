"""Settings of the tasks `dpo` and `reward`."""

from __future__ import annotations

from dataclasses import dataclass

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest

PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm", "simpo", "cpo", "orpo",
)  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
COUPLED = {
    "kto": "its baseline is a mean over the samples of a batch",
    "aot": "it sorts the samples of a batch",
    "aot_unpaired": "it sorts the samples of a batch",
}
"""Losses that are no sums over pairs, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """What is learned from a pair."""

    loss_type: str = "sigmoid"
    """dpo: the loss of a pair: sigmoid, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down,
    discopop, sigmoid_norm; without a reference: simpo, cpo, orpo."""
    beta: float = 0.1
    """dpo: how strongly a pair is told apart; a large value keeps the model near its reference."""
    label_smoothing: float = 0.0
    """robust, exo_pair: the share of pairs that are the wrong way round."""
    simpo_gamma: float = 0.5
    """simpo: the margin between the two answers."""
    discopop_tau: float = 0.05
    """discopop: how sharply its two parts are blended."""
    nll_weight: float | None = None
    """dpo: weight of the chosen answers' own loss, over their tokens; by default 1 for cpo and orpo, else 0."""
    center_rewards: float = 0.0
    """reward: weight of the square of the two rewards' sum, which keeps them around 0."""
    share_prompts: bool = True
    """Lay the prompt of a pair out once; false gives each answer a copy, with the same result."""

    precompute_reference: bool = False
    """dpo: ask the reference about all pairs once before training and keep it with the run; no second model is in memory."""

    def __post_init__(self) -> None:
        if self.precompute_reference and not self.has_reference:
            raise ConfigError(
                f"{self.loss_type} has no reference to ask before training",
                seen=f"precompute_reference=true, loss_type={self.loss_type}",
                do="leave precompute_reference out",
            )
        if self.loss_type in COUPLED:
            raise ConfigError(
                f"{self.loss_type} is no sum over pairs, so a step would depend on how it is cut",
                seen=f"loss_type={self.loss_type}: {COUPLED[self.loss_type]}",
                do="use apo_zero or another loss of pairs",
            )
        if self.loss_type not in PAIR_LOSSES:
            raise ConfigError(
                f"the loss is not known{nearest(str(self.loss_type), list(PAIR_LOSSES))}",
                seen=f"loss_type={self.loss_type!r}",
                do=f"use one of: {', '.join(PAIR_LOSSES)}",
            )
        if self.loss_type == "exo_pair" and self.label_smoothing <= 0:
            raise ConfigError(
                "exo_pair needs some label smoothing",
                seen=f"label_smoothing={self.label_smoothing}",
                do="give a value above 0, such as 1e-3",
            )
        if self.loss_type == "robust" and not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                "robust needs fewer than half of the pairs the wrong way round",
                seen=f"label_smoothing={self.label_smoothing}",
                do="give a value from 0 to below 0.5",
            )
        if self.beta <= 0:
            raise ConfigError("beta must be above 0", seen=f"beta={self.beta}", do="give a value such as 0.1")

    @property
    def has_reference(self) -> bool:
        """Whether answers are compared with what the model said of them before training."""
        return self.loss_type not in WITHOUT_REFERENCE

    @property
    def own_loss_weight(self) -> float:
        """Weight of the chosen answers' own loss."""
        if self.nll_weight is not None:
            return self.nll_weight
        return 1.0 if self.loss_type in ("cpo", "orpo") else 0.0
