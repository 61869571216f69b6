"""The demo models from nothing (``train_demo``): their corpus, their card, and the prompts cut from what was held out."""
