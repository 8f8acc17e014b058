"""The families of backbones behind one interface."""
