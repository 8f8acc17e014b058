"""Training on pairs of a better and a worse answer: `train hf --task dpo | reward`."""
