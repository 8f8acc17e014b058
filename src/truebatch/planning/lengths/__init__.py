"""How long samples are, measured once and cached."""
