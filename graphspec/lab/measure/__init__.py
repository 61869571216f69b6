"""``graphspec profile``: sides measured against each other, and what they did."""
