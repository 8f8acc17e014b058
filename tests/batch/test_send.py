"""Tensors laid end to end on a device."""

from __future__ import annotations

import pytest
import torch

from truebatch.batch.host_to_device import send

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.int32, torch.int64)])
def test_what_arrives_is_what_lies_end_to_end(device, dtypes):
    parts = [torch.arange(6).view(2, 3).to(dtypes[0]), torch.arange(3).view(1, 3).to(dtypes[1])]
    found = send(parts, torch.device(device))
    assert found.device.type == device
    assert torch.equal(found.cpu(), torch.cat(parts))
    again = send([found, found], torch.device(device))  # what is there already
    assert torch.equal(again, torch.cat([found, found]))
