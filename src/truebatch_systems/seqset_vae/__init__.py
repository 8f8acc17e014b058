"""Hospital stays as sequences of sets of events: a VAE over sets, a causal transformer over stays, a risk."""
