"""Target networks, and the reading of checkpoints into them."""
