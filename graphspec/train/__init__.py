"""``graphspec train``: trains a draft for any Llama-shaped target, or a small target from scratch."""
