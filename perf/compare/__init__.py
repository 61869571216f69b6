"""Two revisions of this repository side by side on one machine: ``python -m perf.compare BASE HEAD``."""
