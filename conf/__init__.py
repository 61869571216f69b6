"""The configuration groups, as YAML; installed as graphspec.conf."""
