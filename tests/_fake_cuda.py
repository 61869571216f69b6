"""CUDA without CUDA: fake tensors that know shape, dtype and device and hold no data, and a watch for what capture forbids.

A bare ``FakeTensorMode`` (no shape environment) raises wherever a value is needed on the host or a shape depends on data. What it lets pass
(copies between devices, boolean masks on the left of an assignment) :class:`NoHostTraffic` refuses.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GUARD = Path(__file__).with_name("fake_cuda_guard.cpp")


class HostTrafficError(RuntimeError):
    """An operation that would synchronise with the host, or move data to or from it, inside a captured program."""


@functools.cache
def load_cuda_guard() -> None:
    """Make fake ``cuda`` tensors usable on a CPU build of torch; builds of torch with CUDA need nothing.

    Raises:
        RuntimeError: no C++ compiler, or it failed. The check can't be left out, so neither can the compiler.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("capture-safety tests on a CPU build of torch need a C++ compiler ($CXX, c++ or g++); none was found")
    root = Path(torch.__file__).parent
    flags = [
        "-O0", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-L{root / 'lib'}",
    ]  # fmt: skip
    digest = hashlib.sha256(repr((GUARD.read_text(), compiler, flags, torch.__version__)).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphspec"
    library = folder / f"fake-cuda-{digest}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            done = subprocess.run([compiler, *flags, "-o", str(built), str(GUARD), "-lc10"], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{compiler} could not compile {GUARD.name}:\n{done.stderr[-2000:]}")
            built.replace(library)
    ctypes.CDLL(str(library))


def tensors(*values: Any) -> Iterator[Tensor]:
    """Every tensor inside nested arguments."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return iter(values)
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class NoHostTraffic(TorchDispatchMode):
    """Refuses what a CUDA graph can't hold and fake tensors don't notice.

    Copies between devices, results on the CPU, and masks that index an assignment (their positions are counted on the host).
    Zero-dimensional CPU tensors as *arguments* pass: that is how torch hands a Python number to a kernel.
    """

    COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    ASSIGNMENTS = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default)

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops += 1
        if func in self.COPIES and len({t.device.type for t in tensors(args, result)}) > 1:
            raise HostTrafficError(f"{func}: a copy between devices")
        if func in self.ASSIGNMENTS:
            _, indices, value = args[:3]
            masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks and not (value.dim() == 0 and value.device.type == "cpu"):
                raise HostTrafficError(f"{func}: a boolean mask on the left of an assignment")
        for tensor in tensors(result):
            if tensor.device.type != "cuda" and tensor.dim() > 0:
                raise HostTrafficError(f"{func}: result {list(tensor.shape)} on {tensor.device}")
        return result
