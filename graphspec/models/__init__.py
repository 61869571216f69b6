"""Target networks."""
