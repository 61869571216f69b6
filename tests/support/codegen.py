"""The launches of a compiled CUDA program, counted on a machine without a GPU.

Fake ``cuda`` tensors go through Dynamo, AOTAutograd and Inductor up to the text of the wrapper, which names every kernel it would launch;
nothing runs. An operator of ours counts as one launch: each is written as one, or says otherwise. :func:`compile_kernels` goes on to what
Triton makes of the kernels in that text.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo import lookup_backend
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

from tests.support.fake_cuda import load_cuda_guard

ROOT = Path(__file__).resolve().parents[2]


class _Properties:
    """An H200 as ``torch.cuda.get_device_properties`` describes it."""

    name = "NVIDIA H200"
    major, minor, multi_processor_count, warp_size = 9, 0, 132, 32
    total_memory, L2_cache_size = 141 << 30, 60 << 20
    regs_per_multiprocessor, max_threads_per_multi_processor, max_threads_per_block = 65536, 2048, 1024
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
    gcnArchName = ""


class _Driver:
    """A driver of Triton for a device that does not exist."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_device_interface() -> Any:
        return torch.cuda

    @staticmethod
    def get_active_torch_device() -> torch.device:
        return torch.device("cuda", 0)

    get_current_device = staticmethod(lambda: 0)
    set_current_device = staticmethod(lambda device: None)
    get_current_stream = staticmethod(lambda device=None: 0)
    is_active = staticmethod(lambda: True)


class _TextReachedError(Exception):
    """Raised when the wrapper's text is complete; the next step would need a GPU."""


def _always(value: Any) -> Callable[..., Any]:
    # Dynamo registers handlers by function object and refuses to register one twice, so every fake needs a separate object.
    return lambda *_, **__: value


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """A context in which torch, Inductor and Triton find an H200."""
    import torch._dynamo.device_interface as device_interface
    from torch._functorch import config as functorch_config
    from triton.runtime.driver import driver

    load_cuda_guard()
    properties = _Properties()
    interface = device_interface.get_interface_for_device("cuda")
    on_cuda = {
        "get_device_properties": properties, "get_device_capability": (9, 0), "is_available": True, "is_initialized": True,
        "current_device": 0, "device_count": 1, "_lazy_init": None, "synchronize": None, "set_device": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "set_rng_state": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    on_interface = {
        "get_device_properties": properties, "current_device": 0, "get_compute_capability": 90, "get_raw_stream": 0, "is_available": True,
        "device_count": 1,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in on_cuda.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", _always(value)))
        for name, value in on_interface.items():
            stack.enter_context(mock.patch.object(interface, name, staticmethod(_always(value))))
        for name, value in {"get_device_properties": properties, "current_device": 0}.items():
            stack.enter_context(mock.patch.object(interface.Worker, name, staticmethod(_always(value))))
        from torch.utils._triton import has_triton

        # Modules imported before hold the function under their own names.
        for module in [m for m in list(sys.modules.values()) if getattr(m, "has_triton", None) is has_triton]:
            stack.enter_context(mock.patch.object(module, "has_triton", _always(True)))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _always(0), create=True))
        # The first fake tensor would make a real one, to have torch set up the device.
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", _always(None)))
        stack.enter_context(mock.patch("torch.cuda.graphs._cuda_isCurrentStreamCapturing", _always(False)))
        # The attention patterns are made from real CUDA tensors; attention is an operator here, so nothing would match.
        stack.enter_context(mock.patch("torch._inductor.fx_passes.fuse_attention._sfdp_init", _always(None)))
        # Padding and constant folding would run on the device.
        stack.enter_context(
            inductor_config.patch(compile_threads=1, fx_graph_cache=False, shape_padding=False, joint_graph_constant_folding=False)
        )
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        driver.set_active(_Driver())
        try:
            yield
        finally:
            torch._dynamo.reset()
            driver._active = None


@dataclass(frozen=True)
class Launches:
    """The launches of one program, in order."""

    names: tuple[tuple[str, str], ...]
    """``(kind, name)``: ``triton`` for Inductor's own kernels, ``extern`` for library products, ``op`` for operators, ``copy``."""
    code: str
    returned: int = 0
    """Results that the program's graph returns. A region is compiled without running, so there may be none."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.names)

    @property
    def ops(self) -> Counter[str]:
        """Number of calls of each operator."""
        return Counter(name for kind, name in self.names if kind == "op")

    @property
    def host_marks(self) -> list[str]:
        """Signs of a host read, of a size that depends on data, or of a copy between devices."""
        bodies = "".join(text.partition("def get_args")[0] for text in self.code.split("def call(")[1:])
        return sorted(sign for sign in HOST_SIGNS if re.search(sign, bodies))

    @property
    def copied_arguments(self) -> list[str]:
        """Arguments that the program copies whole before an operator writes them, because something reads what they were after it."""
        copied = re.findall(r"%(as_strided_default\w*) : [^\n]*as_strided\.default\]\(args = \(%(\w+),", self.code)
        cloned = set(re.findall(r"aten\.clone\.default\]\(args = \(%(\w+),\)", self.code))
        return sorted({argument for name, argument in copied if name in cloned})


HOST_SIGNS = (
    r"\.item\(", r"aten\.index\.Tensor", r"aten\.nonzero\.", r"masked_select", r"\bu\d+ = ", r"\.copy_\(", r"device='cpu'",
    r"empty_strided_cpu", r"repeat_interleave", r"_unique",
)  # fmt: skip


def _read(code: str) -> Launches:
    found: list[tuple[str, str]] = []
    for line in code[code.rindex("def call(") :].splitlines():
        line = line.strip()
        if line.startswith(("#", "del ", "return", "def ", "assert_size")):
            continue
        for kind, pattern in (
            ("triton", r"^(triton_\w+)\.run\("),
            ("extern", r"extern_kernels\.(\w+)\("),
            ("op", r"torch\.ops\.([\w.]+?)(?:\.default)?\("),
            ("op", r"\b(aten\.\w+)"),
            ("copy", r"(\.copy_\()"),
        ):
            if match := re.search(pattern, line):
                found.append((kind, match[1]))
                break
    return Launches(tuple(found), code)


def launches_of(*programs: Callable[[], None]) -> Launches:
    """Compile ``programs``, functions over fake ``cuda`` tensors, each as the runtime does, and list what they would launch in turn.

    Raises:
        Exception: whatever stops the compiler before the wrapper's text is complete.
    """
    texts: list[str] = []

    def keep(code: Any) -> None:
        texts.append(code if isinstance(code, str) else code.value)
        raise _TextReachedError

    returned: list[Any] = []

    def inductor(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        (output,) = module.graph.find_nodes(op="output")
        returned.extend(output.args[0])
        return lookup_backend("inductor")(module, inputs)

    found = []
    for program in programs:
        with mock.patch.object(GraphLowering, "save_output_code", staticmethod(keep)), torch.no_grad():
            torch._dynamo.reset()
            try:
                torch.compile(program, fullgraph=True, dynamic=False, backend=inductor)()
            except Exception:
                if not texts:
                    raise
        found.append(_read(texts[-1]))
        texts.clear()
    return Launches(tuple(name for each in found for name in each.names), "\n".join(each.code for each in found), len(returned))


def compile_kernels(found: Launches) -> list[str]:
    """Compile every Triton kernel in a program's text for the pretended GPU, in the first of the configurations that Inductor would try.

    In a process of its own: in that of the tests Triton interprets kernels.

    Returns:
        Their names.

    Raises:
        AssertionError: with what Triton or ptxas says of the first that does not compile.
    """
    calls = [node for node in ast.walk(ast.parse(found.code)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    texts = {
        call.args[0].value: call.args[1].value
        for call in calls
        if call.func.attr == "triton" and len(call.args) == 2 and all(isinstance(argument, ast.Constant) for argument in call.args)
    }
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.codegen"]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(texts)


def _compile_here() -> None:
    """Compile the kernels of standard input, name to text."""
    from torch._inductor.codecache import PyCodeCache

    with pretended_gpu(), mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", _always(None)):
        for name, text in json.load(sys.stdin).items():
            kernel = getattr(PyCodeCache.load(text), name)
            kernel.configs = kernel.configs[:1]
            kernel.precompile(warm_cache_only=True)


if __name__ == "__main__":
    _compile_here()
