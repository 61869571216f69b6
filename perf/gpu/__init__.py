"""Packs the repository for a GPU machine without a network, and measures there."""
