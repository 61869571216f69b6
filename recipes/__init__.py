"""Training recipes: a draft for any target (``train_draft``), the demo models from nothing (``train_demo``), token maps (``token_map``)."""
