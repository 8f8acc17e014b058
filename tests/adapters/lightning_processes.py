"""What each of two processes does in test_lightning: run as a script, started as torchrun starts it."""

import sys
from pathlib import Path

import torch

from tests.adapters.test_lightning import fit, module_of

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    module = module_of("causal_lm", rate=0.1)
    trainer = fit(folder, module, max_epochs=2, devices=2, strategy="ddp")
    torch.save({"losses": module.losses, "gradients": module.found}, folder / f"rank{trainer.global_rank}.pt")
