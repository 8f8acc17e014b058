"""Faults of loss, gradient, state, randomness and images."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.tiny import IGNORE
from tests.verification import planted as P
from tests.verification.faults.fault import CLASS, TEXT, fault, samples
from tests.verification.faults.mixing import Encoder
from truebatch.batch.fields import Field

PER_BATCH, PADDED, MIXED = "loss averaged per micro-batch", "loss counts padding", "samples are mixed"


def language():
    return P.LanguageModel()


fault("loss as a mean", PER_BATCH, fields=TEXT, objective=P.AverageOfAverages)(language)
fault("loss counts padding", PADDED, fields=TEXT, objective=P.CountsPadding)(language)
fault("loss sums padding", PADDED, fields=TEXT, objective=P.SumsPadding)(language)


class MeanTimesCount(P.NextToken):
    """A mean in `sums` beside the right count."""

    def sums(self, model, batch):
        return {"nll": F.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)}


fault("a mean beside the right count", PER_BATCH, fields=TEXT, objective=MeanTimesCount)(language)


class MeanOfMeans(P.NextToken):
    """Every sample's own mean, added up, divided by tokens."""

    def counts(self, batch):
        return {"nll": 1}

    def sums(self, model, batch):
        each = F.cross_entropy(model(batch).transpose(1, 2), batch["labels"], ignore_index=IGNORE, reduction="none")
        return {"nll": (each.sum(1) / each.ne(0).sum(1).clamp(min=1)).mean()}


fault("mean of means", PER_BATCH, fields=TEXT, objective=MeanOfMeans)(language)


class ShiftedAcross(P.NextToken):
    """Shifts labels over the row, so the last token of a sample predicts the first of the next."""

    def counts(self, batch):
        return {"nll": int(batch.is_real.sum()) - batch.num_samples}

    def sums(self, model, batch):
        logits, ids = model(batch)[:, :-1], batch["input_ids"][:, 1:]
        real = batch.is_real[:, 1:]
        return {"nll": (F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * real).sum()}


fault(
    "labels shifted across borders", "labels run across borders", fields=TEXT, objective=ShiftedAcross, layout="packed"
)(language)


class InBatchNegatives(P.Choice):
    """Every sample against every other one."""

    def sums(self, model, batch):
        y = model(batch)
        return {"nll": F.cross_entropy(y @ y.T, torch.arange(len(y)), reduction="sum")}


fault("in-batch negatives", MIXED, fields=CLASS, objective=InBatchNegatives)(P.Classifier)


class Weighed(P.Choice):
    """Weights of classes that are counted in the micro-batch."""

    def sums(self, model, batch):
        weights = 1 / torch.bincount(batch["label"], minlength=3).clamp(min=1)
        each = F.cross_entropy(model(batch), batch["label"], reduction="none")
        return {"nll": (each * weights[batch["label"]]).sum()}


fault("class weights counted in the micro-batch", MIXED, PER_BATCH, fields=CLASS, objective=Weighed)(P.Classifier)


class Regularised(P.NextToken):
    """A penalty added once for every micro-batch."""

    def sums(self, model, batch):
        return {"nll": super().sums(model, batch)["nll"] + model.head.weight.square().sum()}


fault("a penalty once a micro-batch", PER_BATCH, "a term once per micro-batch", fields=TEXT, objective=Regularised)(
    language
)


# --- gradients --------------------------------------------------------------------------------------------------------

HOOK, CUT = "a gradient hook runs per micro-batch", "gradients are cut off"


@fault("a clip in a gradient hook", HOOK, says="layers.0.mlp.weight", fields=TEXT, objective=P.NextToken)
def clipped():
    model = P.LanguageModel()
    weight = model.layers[0].mlp.weight
    weight.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
    return model


@fault("a clip after accumulation", HOOK, says="layers.0.mlp.weight", fields=TEXT, objective=P.NextToken)
def clipped_after():
    model = P.LanguageModel()

    def clip(parameter):
        parameter.grad.clamp_(-1e-3, 1e-3)

    model.layers[0].mlp.weight.register_post_accumulate_grad_hook(clip)
    return model


@fault("a full backward hook", HOOK, says="layers.0", fields=TEXT, objective=P.NextToken)
def module_hook():
    model = P.LanguageModel()
    model.layers[0].mlp.register_full_backward_hook(lambda _m, grads, _o: tuple(g / (g.norm() + 1e-6) for g in grads))
    return model


@fault("detached for several rows", CUT, says="layers", fields=TEXT, objective=P.NextToken)
class Detached(P.LanguageModel):
    def hidden(self, batch):
        x = super().hidden(batch)
        return x.detach() if len(x) > 1 else x


class Unit(torch.autograd.Function):
    """Identity, whose gradient has length 1 in every micro-batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-12)


@fault(
    "a gradient scaled to length 1 in backward",
    "only gradients differ",
    says="layers.1",
    fields=TEXT,
    objective=P.NextToken,
)
class Normalised(P.LanguageModel):
    def hidden(self, batch):
        return Unit.apply(super().hidden(batch))


# --- state and randomness ---------------------------------------------------------------------------------------------

KEPT, NOISE = "state kept between calls", "randomness is not keyed by sample"


@fault("state kept between calls", KEPT, says="memory")
class Remembers(Encoder):
    memory = 0.0

    def mix(self, x, batch):
        x = x + 0.1 * self.memory
        self.memory = x.detach().mean()
        return x


@fault("a counter of calls", KEPT, says="calls")
class Counts(Encoder):
    calls = 0

    def mix(self, x, batch):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


@fault("functional dropout in eval", NOISE, says="dropout")
class AlwaysDrops(Encoder):
    def mix(self, x, batch):
        return F.dropout(x, 0.2, training=True) + 0 * torch.rand_like(x) + 0.1 * torch.rand_like(x)


@fault("noise drawn for the micro-batch", NOISE, says="randn")
class Noisy(Encoder):
    def mix(self, x, batch):
        return x + 0.1 * torch.randn(x.shape)


@fault(
    "noise of one seed for the micro-batch",
    NOISE,
    "the result depends on the number of rows",
    "row numbers count",
    says="randn",
)
class SeededNoise(Encoder):
    def mix(self, x, batch):
        return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


# --- crashes, zeros, NaN, images --------------------------------------------------------------------------------------


@fault("an exception is swallowed", "exception swallowed", fields=TEXT, objective=P.NextToken)
class Swallowed(P.ZerosOnError):
    pass


@fault("NaN from padding", "NaN in micro-batches only", fields=TEXT, objective=P.NextToken)
class Nan(P.NanInPadding):
    pass


@fault("wrong polarity", "mask in the wrong polarity", fields=TEXT, objective=P.NextToken, layout="used")
class Polarity(P.WrongPolarity):
    pass


@fault("a 2-D mask for decoder layers", "2-D mask passed to decoder layers", fields=TEXT, objective=P.NextToken)
class TwoDimensional(P.TwoDimensionalMask):
    pass


@fault("a language model that sees later tokens", "later tokens are seen", fields=TEXT, objective=P.NextToken)
class SeesLater(P.LanguageModel):
    causal = False


@fault("cos and sin cached too short", "the model raises for several samples", "raises in a micro-batch", says=())
class ShortTable(Encoder):
    def __init__(self):
        super().__init__()
        self.cache = torch.randn(30, 16)

    def mix(self, x, batch):
        at = batch.positions + (len(x) > 1) * 10
        return x + self.cache[at]


def pictures():
    rng = np.random.default_rng(0)
    return [
        {**s, "image": rng.normal(size=(1 + at % 3, 16)).astype("float32")} for at, s in enumerate(samples())
    ]  # fmt: skip


@fault(
    "image features scattered by row", "samples are mixed", "row 0 stands for the whole micro-batch", "rows change places",
    fields=(Field(name="input_ids"), Field(name="image", kind="flat", axis="image")), data=pictures,
)  # fmt: skip
class ScatteredByRow(Encoder):
    def mix(self, x, batch):
        first = batch["image"][: len(x)]
        return x + first[:, None] if len(first) == len(x) else x
