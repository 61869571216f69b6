"""The ``graphspec plan`` command: work the advice out, print it, write its records."""

from __future__ import annotations

import json

from rich.console import Console
from rich.text import Text

from ...config.command_options import LaunchConfig
from ...config.paths import check_writable, make_folder
from ..measure.provenance import provenance, write_jsonl
from .plan import advise
from .tables import show


def run(config: LaunchConfig) -> int:
    """The command.

    Raises:
        ConfigError, CheckpointError: as :func:`.plan.advise`; or ``plan.out`` can't be written.
    """
    out = check_writable("plan.out", config.plan.out) if config.plan.out is not None else None
    err = Console(stderr=True)
    if err.is_terminal:
        with err.status("") as status:
            advice = advise(config, status.update)
    else:
        advice = advise(config, lambda text: err.print(Text(text), soft_wrap=True))
    if out is not None:
        make_folder("plan.out", out.parent)
        write_jsonl(out, [provenance(config), *advice.records()], "plan.out")
    if config.format == "json":
        print(json.dumps(advice.document(), default=str))
    else:
        show(advice)
        if out is not None:
            print(f"written to {out}")
    return 0
