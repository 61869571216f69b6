"""``graphspec train``: trains a draft for any Llama-shaped target."""
