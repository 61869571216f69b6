"""Configuration: its schema, what the command line may set, the catalog of variants, and checks of single values. Imports no torch."""

from __future__ import annotations
