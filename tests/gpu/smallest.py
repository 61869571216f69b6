"""Every fused op once, on its first case, on a CUDA device, to be run under ``compute-sanitizer``."""

from __future__ import annotations

import torch

from graphspec.kernels import OPS
from tests.kernels.cases import cases_of


def main() -> None:
    for op in OPS:
        case = cases_of(op, torch.Generator().manual_seed(0))[0]
        for name in op.fused_names:
            op.call(op.implementation(name), {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()})
            torch.cuda.synchronize()
            print(op.name, name)


if __name__ == "__main__":
    main()
