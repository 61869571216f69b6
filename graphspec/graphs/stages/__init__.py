"""The stages of a cycle and of a prefill chunk, and the acceptance rules."""
