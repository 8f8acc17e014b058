"""Files: written whole or not at all, read in the encodings they come in."""
