"""Which folders are packages; everything else about the project is in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

# conf/ stands at the top of the repository, where readers look for it, and is the package graphspec.conf once installed. A table of
# pyproject.toml either finds packages or maps one to another folder, not both.
setup(
    packages=[*find_packages(include=["graphspec", "graphspec.*"]), "graphspec.conf"],
    package_dir={"graphspec": "graphspec", "graphspec.conf": "conf"},
)
