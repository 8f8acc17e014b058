"""Settings that a run chooses itself."""
