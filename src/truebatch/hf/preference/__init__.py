"""Log-probabilities of completions, rewards, and training on preferences."""
