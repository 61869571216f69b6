"""The ways to draft, one folder each. A folder's ``__init__`` holds its row of :mod:`graphspec.config.catalog` and imports no torch."""
