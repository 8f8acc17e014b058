"""Memory on a CPU: what was freed is given back, and oneDNN, which makes no kernels any more once it ran out, is left."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.mkldnn.is_available(), reason="needs oneDNN and RLIMIT_AS"
)
BREAK = """
import json, logging, resource, torch
from torch.nn.functional import gelu
from truebatch.training.memory import oom as outofmemory
said = []
class Keep(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("truebatch").addHandler(Keep())

def works(size):
    try:
        gelu(torch.zeros(size))
    except RuntimeError as error:
        assert outofmemory.is_out_of_memory(error), error
        text.append(str(error))
        return False
    return True

text = []
assert works(2)
outofmemory.free_memory(torch.device("cpu"), said="could not create a primitive")
before = torch.backends.mkldnn.enabled
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
for size in range(1000, 1100):
    if not works(size):
        break
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
broken = not works(2000)
"""


def run(code: str) -> dict:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_freed_also_leaves_kernels_that_fail_for_ever():
    after = """
    outofmemory.free_memory(torch.device("cpu"), said=text[-1])
    after, on = works(3000), torch.backends.mkldnn.enabled
    print(json.dumps({"before": before, "broken": broken, "after": after, "on": on, "said": said}))
    """
    found = run(BREAK + textwrap.dedent(after))
    if not found["broken"]:
        pytest.skip("this oneDNN forgets that it ran out of memory")
    assert found["before"], "kernels that work are kept"
    assert found["after"]
    assert not found["on"]
    assert len(found["said"]) == 1
    assert "oneDNN" in found["said"][0]


def test_a_step_with_room_ends_well_although_the_kernels_are_broken():
    step = """
    from benchmarks.scripts import oom_cuda
    from truebatch.training.memory.oom_retry import OomGuard
    model = oom_cuda.Decoder(50, 16, 1)
    groups = oom_cuda.make_groups([oom_cuda.Group(optimiser=torch.optim.AdamW(model.parameters(), 1e-3))], model)
    guard = OomGuard(fields=oom_cuda.FIELDS)
    engine = oom_cuda.StepEngine(
        model=model, objective=oom_cuda.NextToken(), groups=groups, device=torch.device("cpu"), guard=guard
    )
    loss, found = oom_cuda.gradient(engine, oom_cuda.make_steps(50, 24, 1, 8)[0])
    print(json.dumps({"broken": broken, "tries": guard.recoveries + 1, "left_out": list(guard.quarantined),
                      "finite": bool(found.isfinite().all())}))
    """
    found = run(BREAK + textwrap.dedent(step))
    if not found["broken"]:
        pytest.skip("this oneDNN forgets that it ran out of memory")
    assert found == {"broken": True, "tries": 2, "left_out": [], "finite": True}


@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux")
def test_memory_freed_on_a_cpu_is_given_back_to_the_system():
    found = run("""
    import json, resource, torch
    from truebatch.training.memory.oom import free_memory
    def used(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    free_memory(torch.device("cpu"))
    before = used()
    large = torch.ones(7 * 2**20)
    del large  # from here on the C library keeps blocks of up to this size
    blocks = [torch.ones(2**18) for _ in range(300)]
    last, full = blocks.pop(), used()
    blocks.clear()
    free_memory(torch.device("cpu"))
    print(json.dumps({"taken": full - before, "kept": used() - before}))
    """)
    assert found["taken"] > 250 * 2**20
    assert found["kept"] < 50 * 2**20
