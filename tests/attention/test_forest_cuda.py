"""Trees of segments on a GPU: the merged kernel calls against fp32, forward and backward."""

import pytest
import torch

from truebatch.attention.api import attend
from truebatch.attention.forest import attend_forest, choose_forest_kernel
from truebatch.attention.score_rule import Rule
from truebatch.batch.segments import forest_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FORESTS = {
    "a prompt and its answers": ([300, 70, 1, 129, 64], [-1, 0, 0, 0, 0]),
    "several levels": ([64, 33, 257, 5, 1, 200, 90], [-1, 0, 1, 1, 0, 4, -1]),
}


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("width", [64, 60, 128])
def test_half_precision_is_as_close_to_fp32_as_a_copy_for_each_path(name, width):
    segments = forest_segments(*FORESTS[name]).to("cuda")
    chance = torch.Generator().manual_seed(0)
    shapes = [(1, heads, segments.num_cells, width) for heads in (8, 2, 2, 8)]
    *exact, grad = (torch.randn(shape, generator=chance).cuda() for shape in shapes)
    exact = [part.requires_grad_() for part in exact]
    half = [part.detach().bfloat16().requires_grad_() for part in exact]
    assert choose_forest_kernel(*half) == "merged"
    wanted = attend_forest(Rule(causal=True), *exact, segments, kernel="per_segment")
    copied = attend_forest(Rule(causal=True), *half, segments, kernel="per_segment")
    found = attend(*half, segments, causal=True)
    gradients = [torch.autograd.grad(out, parts, grad.to(out.dtype)) for out, parts in
                 ((wanted, exact), (copied, half), (found, half))]  # fmt: skip
    for reference, one, ours in zip(
        (wanted, *gradients[0]), (copied, *gradients[1]), (found, *gradients[2]), strict=True
    ):
        assert (ours.float() - reference).norm() <= 2 * (one.float() - reference).norm()


def test_full_precision_has_a_way_too():
    segments = forest_segments([20, 3, 4], [-1, 0, 0]).to("cuda")
    parts = [torch.randn(1, 2, 27, 16, device="cuda") for _ in range(3)]
    assert choose_forest_kernel(*parts) == "per_segment"
    assert attend(*parts, segments, causal=True).isfinite().all()
