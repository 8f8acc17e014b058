"""The VAE over sets and the transformer over stays."""
