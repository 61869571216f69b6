"""The process of a rank that an engine starts: ``python -m graphspec.api.follower``, its configuration on the standard input."""

from __future__ import annotations

import os
import pickle
import struct
import sys

from ..engine.ranks import READY, end_with_pipe, join
from ..errors import GraphspecError
from .llm import LLM


def main() -> int:
    """Serve rank 0 to its end, and say in the pipe why where that is an error."""
    pipe, given = os.fdopen(int(sys.argv[1]), "wb", buffering=0), sys.stdin.buffer
    (size,) = struct.unpack("=q", given.read(8))
    config, *rendezvous = pickle.loads(given.read(size))
    end_with_pipe(given)
    try:
        pipe.write(READY)
        join(*rendezvous)
        LLM(config=config)
    except SystemExit:
        return 0
    except GraphspecError as error:
        if error.key != "ranks":
            pipe.write(str(error).encode())
    except Exception as error:
        pipe.write(f"{type(error).__name__}: {error}".encode())
        raise
    return 1


if __name__ == "__main__":
    sys.exit(main())
