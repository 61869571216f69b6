"""Measurements and the checks that need a GPU. Not part of the installed package."""
