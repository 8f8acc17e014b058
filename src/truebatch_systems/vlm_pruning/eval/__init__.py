"""Generation with tokens removed, scores, baselines and plots."""
