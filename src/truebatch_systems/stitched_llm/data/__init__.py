"""Text, vocabularies and the embedded donors."""
