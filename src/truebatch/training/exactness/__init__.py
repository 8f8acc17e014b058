"""Steps with the same bits under any cut: whole atoms, deterministic kernels, sums in one fixed tree."""
