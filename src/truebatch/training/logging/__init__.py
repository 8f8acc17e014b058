"""Records of a run: `metrics.jsonl` and trackers."""
