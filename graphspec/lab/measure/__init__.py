"""``graphspec profile``: sides measured against each other."""
