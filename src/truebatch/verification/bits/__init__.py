"""`verify` with `exactness: bits`."""
