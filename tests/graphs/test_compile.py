"""Compiled regions: a failed compilation is one message, and the alternative that it names works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from graphspec.errors import ResourceError
from graphspec.graphs import compile as compile_module
from graphspec.graphs.compile import Region, compile_stages
from graphspec.host import native_build
from tests.support.engines import mirror_pair


class Views:
    def __init__(self) -> None:
        self.x = torch.zeros(4)


class Add(torch.nn.Module):
    """The attributes of a stage that a region uses."""

    name: ClassVar[str] = "add"

    def forward(self, views: Any) -> None:
        views.x += 1


def region(views: Views) -> Callable[[], None]:
    return compile_stages([Add()], views)  # type: ignore[list-item, arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Inductor caches what it compiles: nothing is there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


def test_a_region_compiles_once() -> None:
    views = Views()
    run = region(views)
    for count in (1, 2, 3):
        run()
        assert views.x.tolist() == [count] * 4


def test_loops_run_on_the_configured_number_of_threads(cache: Path) -> None:
    """Native ops have their own threads; a second team would compete for the cores."""
    from torch._inductor.utils import run_and_get_code

    views = Views()
    views.x = torch.zeros(1 << 20)
    _, codes = run_and_get_code(compile_stages([Add()], views, threads=1))  # type: ignore[list-item, arg-type]
    assert views.x.eq(1).all()
    assert "1048576L" in "".join(codes) and "#pragma omp" not in "".join(codes)


def test_without_a_compiler_there_is_one_message(cache: Path) -> None:
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/compiler")}), pytest.raises(ResourceError) as caught:
        region(Views())()
    assert str(caught.value).startswith("runtime=compiled: expected a C++ compiler that torch.compile can use")
    assert caught.value.hint == "install g++, or choose runtime=eager"


def test_a_compiler_that_fails_is_one_message(cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(
        "#!/bin/sh\ncase \"$*\" in *--version*|*-dumpversion*) echo 'g++ 12'; exit 0;; esac\necho 'out of cheese' >&2\nexit 3\n"
    )
    broken.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(broken))}), pytest.raises(ResourceError, match="out of cheese") as caught:
        region(Views())()
    assert caught.value.hint == "install g++, or choose runtime=eager"


def test_a_cache_that_others_may_write_to_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(ResourceError, match=r"compiler cache: .*inductor: user \d+, mode 0777.*TORCHINDUCTOR_CACHE_DIR"):
        region(Views())
    assert list(cache.iterdir()) == [], "nothing was read or written"
    cache.chmod(0o700)
    region(Views())


def test_another_users_cache_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    owner = cache.stat().st_uid
    if owner == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(native_build.os, "geteuid", lambda: owner + 1)
    with pytest.raises(ResourceError, match="a folder for compiled code that is yours"):
        region(Views())


def test_a_cache_that_cannot_be_made_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inductor"))
    with pytest.raises(ResourceError, match=r"compiler cache: .*Not a directory.*TORCHINDUCTOR_CACHE_DIR"):
        region(Views())


def test_other_errors_of_a_compilation_stay_what_they_are(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(compile_module, "lookup_backend", lambda name: broken)
    with pytest.raises(Exception, match="no such thing") as caught:
        region(Views())()
    assert not isinstance(caught.value, ResourceError)


def test_a_region_whose_first_run_fails_goes_on_without_compiling(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out between compiling and running."""
    calls: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        calls.append("compile")

        def code(*tensors: Any) -> Any:
            calls.append("run")
            if len(calls) == 2:
                raise torch.OutOfMemoryError("out of memory")
            return module(*tensors)

        return code

    monkeypatch.setattr(compile_module, "lookup_backend", lambda name: backend)
    views = Views()
    run = region(views)
    assert isinstance(run, Region)
    with pytest.raises(torch.OutOfMemoryError):
        run()
    run()
    assert (calls, views.x.tolist()) == (["compile", "run", "run"], [1.0] * 4)


WITHOUT = """
import sys
from graphspec import LLM, SamplingParams
from graphspec.errors import ResourceError
options = {"variant": "none", "buckets": [1], "max_rows": 1, "prefill_chunks": [16]}
params = SamplingParams(max_tokens=3)
for runtime, attention in (("compiled", "auto"), ("compiled", "reference"), ("eager", "auto")):
    try:
        llm = LLM(sys.argv[1], runtime=runtime, attention=attention, linear=attention, **options)
        print(runtime, len(llm.generate([[1, 2, 3]], params)[0].token_ids))
    except ResourceError as error:
        print(runtime, error.hint)
"""


@pytest.mark.parametrize("missing", ["CXX", "PATH"])
def test_where_there_is_no_compiler_the_hint_works(tmp_path: Path, missing: str) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment |= {"CXX": str(tmp_path / "none")} if missing == "CXX" else {"PATH": str(tmp_path)}
    if missing == "PATH":
        environment.pop("CXX", None)
    command = [sys.executable, "-c", WITHOUT, str(mirror_pair(tmp_path).target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "compiled install g++, or choose runtime=eager, with kernels.attention and kernels.linear auto or reference",
        "compiled install g++, or choose runtime=eager",
        "eager 3",
    ], done.stderr
