"""Hospital stays: read, repaired, transformed, cached, made up."""
