"""``graphspec train``: a draft for any Llama-shaped target, or a small target from nothing."""
