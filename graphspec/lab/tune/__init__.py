"""``graphspec tune``: the shape that is fastest on this machine."""
