"""Training recipes: the demo models, from nothing, with one command (`make train-demo`)."""
