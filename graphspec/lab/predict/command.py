"""The ``graphspec plan`` command: work the advice out, print it, write its records."""

from __future__ import annotations

import json

from ...config.command_options import LaunchConfig
from ...config.paths import check_writable, make_folder
from ...host.terminal import status
from ..measure.provenance import provenance, write_jsonl
from .plan import advise
from .tables import show


def run(config: LaunchConfig) -> int:
    """The command.

    Raises:
        ConfigError, CheckpointError: as :func:`.plan.advise`; or ``plan.out`` can't be written.
    """
    out = check_writable("plan.out", config.plan.out) if config.plan.out is not None else None
    with status(lines=True) as say:
        advice = advise(config, say)
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
