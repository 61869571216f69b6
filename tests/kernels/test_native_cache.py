"""The cache of compiled libraries: no other user's code is loaded, truncated files are built again, and failures are one message."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graphspec.drafters.ngram_trie import trie
from graphspec.errors import ResourceError
from graphspec.host import native_build
from graphspec.host.native_build import SharedLibrary, cache_folder, check_trusted

ANSWER = 'extern "C" int answer() {{ return {0}; }}\n'


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedLibrary:
    """A small library that compiles quickly, in its own package."""
    package = tmp_path / "packages" / "answering"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "answer.cpp").write_text(ANSWER.format(42))
    monkeypatch.syspath_prepend(package.parent)
    return SharedLibrary("answer", "answering", ("answer.cpp",), (), ("-O0", "-shared", "-fPIC"), "a key", "a hint")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "graphspec"


def planted(library: SharedLibrary, folder: Path, tmp_path: Path) -> bytes:
    """Another library, which answers 666."""
    evil = tmp_path / "packages" / "evil"
    evil.mkdir()
    (evil / "__init__.py").touch()
    (evil / "answer.cpp").write_text(ANSWER.format(666))
    return replace(library, package="evil").build(folder / "evil").read_bytes()


def test_it_is_built_once_for_its_user_alone(library: SharedLibrary, folder: Path) -> None:
    path = library.build(folder)
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in (folder, path)] == [0o700, 0o600]
    assert list(folder.iterdir()) == [path], "nothing is left of the build"
    written = path.stat()
    assert library.load(folder).answer() == 42
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_a_planted_library_is_not_loaded(library: SharedLibrary, folder: Path, tmp_path: Path) -> None:
    path = library.build(folder)
    path.write_bytes(planted(library, folder, tmp_path))
    assert library.load(folder).answer() == 42
    # As files were named before their content was part of the name.
    bare = path.with_name(path.name.rpartition("-")[0] + ".so")
    path.rename(bare)
    assert library.load(folder).answer() == 42


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_library_cut_short_is_built_again(library: SharedLibrary, folder: Path, kept: int) -> None:
    path = library.build(folder)
    path.write_bytes(path.read_bytes()[:kept])
    assert library.load(folder).answer() == 42


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(library: SharedLibrary, folder: Path, mode: int) -> None:
    library.build(folder)
    folder.chmod(mode)
    with pytest.raises(ResourceError, match=rf"^a key: expected a cache folder that is yours .*mode 0{mode:o}.*XDG_CACHE_HOME") as caught:
        library.load(folder)
    assert "\n" not in str(caught.value)
    folder.chmod(0o755)
    assert library.load(folder).answer() == 42, "others may read"


def test_a_library_that_others_may_write_to_is_refused(library: SharedLibrary, folder: Path) -> None:
    path = library.build(folder)
    path.chmod(0o666)
    with pytest.raises(ResourceError, match="expected a library that is yours"):
        library.load(folder)


def test_another_users_folder_is_refused(library: SharedLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.build(folder)
    owner = folder.stat().st_uid
    monkeypatch.setattr(native_build.os, "geteuid", lambda: owner + 1)
    with pytest.raises(ResourceError, match=rf"user {owner}, mode 0700; you are {owner + 1}"):
        library.load(folder)


def test_a_link_is_refused(library: SharedLibrary, folder: Path) -> None:
    path = library.build(folder)
    elsewhere = folder.parent / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ResourceError, match="a library, no link to one"):
        library.load(folder)


def test_the_folder_may_be_a_link_to_one_of_ours(library: SharedLibrary, folder: Path) -> None:
    library.build(folder)
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert library.load(link).answer() == 42


def test_the_folder_is_opened_once(library: SharedLibrary, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder put in its place after it was opened has no effect."""
    path, evil = library.build(folder), planted(library, folder, tmp_path)
    opened: list[str] = []
    cdll = ctypes.CDLL

    def swapped(name: str) -> ctypes.CDLL:
        opened.append(name)
        folder.rename(folder.parent / "aside")
        folder.mkdir()
        path.write_bytes(evil)
        return cdll(name)

    monkeypatch.setattr(native_build.ctypes, "CDLL", swapped)
    assert library.load(folder).answer() == 42
    assert opened[0].endswith(path.name)


@pytest.mark.parametrize("blocked", ["graphspec", ".", "proc"])
def test_a_cache_that_cannot_be_made_is_one_message(
    library: SharedLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """A file where the folder should be or one above it; a file system that takes no folders. Root is stopped by these too."""
    home = tmp_path / "home"
    if blocked == "graphspec":
        home.mkdir()
        (home / "graphspec").touch()
    elif blocked == ".":
        home.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self" if blocked == "proc" else str(home))
    with pytest.raises(
        ResourceError, match=r"^a key: expected a cache folder that can be written, found .*graphspec: .*XDG_CACHE_HOME"
    ) as caught:
        library.load()
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_message_and_leaves_nothing(library: SharedLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native_build.os, "rename", full)
    with pytest.raises(ResourceError, match=r"can be written, found .*: No space left on device \(set XDG_CACHE_HOME"):
        library.load(folder)
    assert list(folder.iterdir()) == []


def test_no_place_to_compile_in_is_one_message(library: SharedLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build.tempfile, "tempdir", "/proc/self/none")
    with pytest.raises(ResourceError, match=r"a temporary folder to compile in.*TMPDIR"):
        library.load(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other rules")
def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for elsewhere, expected in (("", tmp_path / ".cache"), (str(tmp_path / "other"), tmp_path / "other")):
        monkeypatch.setenv("XDG_CACHE_HOME", elsewhere)
        assert cache_folder() == expected / "graphspec"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other rules")
def test_without_a_home_folder_the_message_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without an entry in the table of users; then ``~`` stays as it is."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ResourceError, match="XDG_CACHE_HOME or HOME"):
        cache_folder()


def test_processes_that_build_at_once_end_up_with_one_library(tmp_path: Path) -> None:
    code = "from graphspec.drafters.ngram_trie import trie; assert trie.load(); print(trie.LIBRARY.build().name)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    names = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert {entry.name for entry in (tmp_path / "graphspec").iterdir()} == names
    assert trie.LIBRARY.build(tmp_path / "graphspec").name in names


def test_a_library_the_system_cannot_load_is_one_message(library: SharedLibrary, folder: Path) -> None:
    with pytest.raises(ResourceError, match="a system that can load"):
        replace(library, flags=("-O0", "-c", "-fPIC")).load(folder)


def test_another_programs_folder_may_be_its_groups_or_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, owner = tmp_path.stat().st_gid, tmp_path.stat().st_uid
    monkeypatch.setattr(native_build.os, "getegid", lambda: group)
    tmp_path.chmod(0o775)
    check_trusted(tmp_path, "a key", "a hint")
    monkeypatch.setattr(native_build.os, "getegid", lambda: group + 1)
    with pytest.raises(ResourceError, match=r"a key: .*mode 0775.*\(a hint\)"):
        check_trusted(tmp_path, "a key", "a hint")
    tmp_path.chmod(0o777)
    monkeypatch.setattr(native_build.os, "getegid", lambda: group)
    with pytest.raises(ResourceError, match="mode 0777"):
        check_trusted(tmp_path, "a key", "a hint")
    tmp_path.chmod(0o700)
    monkeypatch.setattr(native_build.os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(ResourceError, match=f"user {owner}"):
            check_trusted(tmp_path, "a key", "a hint")
    else:
        check_trusted(tmp_path, "a key", "a hint")
