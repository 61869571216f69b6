"""The path of the environment with the clients, from ``--clients``."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def clients(request: pytest.FixtureRequest) -> Path:
    """The folder of the clients' programs."""
    found = Path(request.config.getoption("--clients")).absolute()
    assert (found / "python").exists(), f"no clients in {found}: make test-clients installs them"
    return found
