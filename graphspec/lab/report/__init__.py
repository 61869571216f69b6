"""``graphspec report``: result files drawn as one HTML page."""
