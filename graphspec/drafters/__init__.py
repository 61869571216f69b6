"""The ways to draft, one folder each. A folder's ``__init__`` holds its row of :mod:`graphspec.catalog` and imports no torch."""
