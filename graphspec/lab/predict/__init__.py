"""``graphspec plan``: what fits and how fast it can be, predicted."""
