"""Draft networks."""
