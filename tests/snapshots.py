"""The resolved configuration of each experiment, committed so that a reader sees every value and a diff shows every change.

``python -m tests.snapshots`` (``make snapshots``) writes them anew.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from graphspec.config.compose import config_groups, load_config

FOLDER = Path(__file__).parent / "snapshots"


def resolved(experiment: str) -> str:
    """The YAML text of one experiment, with nothing left to look up."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(load_config(f"experiment={experiment}"))))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.yaml"):
        stale.unlink()
    for experiment in config_groups()["experiment"]:
        (FOLDER / f"{experiment}.yaml").write_text(resolved(experiment), encoding="utf-8")


if __name__ == "__main__":
    main()
