"""Taking the repository to a GPU machine without a network."""
