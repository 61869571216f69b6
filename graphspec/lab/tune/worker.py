"""A worker that also chooses shapes; these commands need no ``prepare``.

==============  ==============================================  =================================
command         with                                            answer
==============  ==============================================  =================================
``tried``       ``config``                                      shapes that a trial runs
``short_list``  ``config``, ``batches``, ``trial``              :func:`.short_list.short_list`
==============  ==============================================  =================================
"""

from __future__ import annotations

from typing import Any

from ...config.command_options import LaunchConfig
from ..measure.worker import Worker, main


class TuneWorker(Worker):
    """Executes the commands of :class:`~graphspec.lab.measure.worker.Worker` and those above."""

    def do_tried(self, config: LaunchConfig) -> list[list[int]]:
        from .short_list import tried_shapes

        return tried_shapes(config)

    def do_short_list(self, config: LaunchConfig, batches: list[int], trial: list[dict[str, Any]]) -> dict[str, Any]:
        from .short_list import short_list

        return short_list(config, batches, trial)


if __name__ == "__main__":
    main(TuneWorker)
