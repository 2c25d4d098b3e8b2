"""Compiling and loading the kernels: once, into a folder of one's own, and never at the price of a run."""

import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from proximo.checkpoint.environment import describe_environment
from proximo.cli.doctor import CHECKS
from proximo.errors import UserError
from proximo_cpu import build, cache, compiler
from proximo_cpu import library as module
from proximo_cpu.library import describe_kernels, kernels_for, library, pointer, why_no_kernels
from waiting import wait_until

needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@pytest.fixture
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled yet, a home of the test's own, and a compiler that does not take its time."""
    monkeypatch.delenv(module.SWITCH, raising=False)
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-O0"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def forget() -> None:
    """As in a new process."""
    for each in (library, module._library_or_reason, cache._own_folder, compiler.fingerprint, compiler.version_of):
        each.cache_clear()
    build._BEGUN.clear()


def compiler_that(folder: Path, does: str) -> Path:
    path = folder / "strange-cc"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def made(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "proximo").iterdir())


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="there is no gcc")
def test_where_gcc_is_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc")
    assert library() is not None, "all other tests of kernels would be skipped"


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_kernels_are_compiled_once_into_a_folder_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library() is not None
    (path,) = made(tmp_path)
    described = describe_kernels()
    assert described is not None
    assert path.name.startswith(f"kernels-{described.rpartition(', ')[2]}-")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    forget()
    monkeypatch.setattr(build, "compile_kernels", None)
    assert library() is not None


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("which", ["cache/proximo", "cache", "."])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_may_write_to_is_not_trusted(
    which: str, mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "proximo"
    folder.mkdir(parents=True)
    (tmp_path / which).chmod(mode)
    assert cache.cache_folder() == cache._own_folder()
    assert stat.S_IMODE(cache._own_folder().stat().st_mode) == 0o700
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"others may write to {(tmp_path / which).resolve()}"
    ]


@pytest.mark.usefixtures("_anew")
def test_a_sticky_folder_above_will_do(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "proximo"
    folder.mkdir(parents=True)
    (tmp_path / "cache").chmod(0o1777)
    assert cache.cache_folder() == folder.resolve()
    folder.chmod(0o1777)
    assert cache.cache_folder() == cache._own_folder()


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["cache/proximo", "cache"])
def test_a_folder_of_somebody_else_is_not_trusted(which: str, tmp_path: Path) -> None:
    (tmp_path / "cache" / "proximo").mkdir(parents=True)
    os.chown(tmp_path / which, 12345, 12345)
    assert cache.cache_folder() == cache._own_folder()


def put(path: Path, content: bytes) -> None:
    """In place of the file. A process that has loaded it keeps it; written into, it would end that process at exit."""
    path.unlink()
    path.write_bytes(content)


def cut(path: Path) -> None:
    put(path, path.read_bytes()[:4096])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    put(path, bytes(content))


def replace_by_link(path: Path) -> None:
    elsewhere = path.parent.parent / path.name
    path.replace(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "a bit": flip,
    "writable by all": lambda path: path.chmod(0o777),
    "writable by a group": lambda path: path.chmod(0o620),
    "a link": replace_by_link,
    "another's": lambda path: os.chown(path, 12345, 12345),
}


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_damaged_or_open_to_others_is_made_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not loaded: one that is cut would end the process with SIGBUS."""
    if damage == "another's" and os.getuid() != 0:
        pytest.skip("only root can give files away")
    content = bytes(5000)  # anything: what is kept is not loaded here
    path = cache.add_to_cache(cache.cache_folder(), "0123", content)
    assert cache.find_cached(path.parent, "0123") == path
    DAMAGES[damage](path)
    assert cache.find_cached(path.parent, "0123") is None
    assert made(tmp_path) == []
    assert cache.add_to_cache(path.parent, "0123", content) == path
    assert cache.find_cached(path.parent, "0123") == path
    assert path.read_bytes() == content


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_a_library_cut_short_is_compiled_again_and_loaded(tmp_path: Path) -> None:
    assert library() is not None
    (path,) = made(tmp_path)
    whole = path.read_bytes()
    cut(path)
    forget()
    assert library() is not None
    assert [each.read_bytes()[:4096] for each in made(tmp_path)] == [whole[:4096]]
    assert len(made(tmp_path)[0].read_bytes()) == len(whole)


@pytest.mark.usefixtures("_anew")
def test_a_library_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = [], os.fsync

    def synced(descriptor: int) -> None:
        seen.append([path.name for path in made(tmp_path) if path.is_file()])
        plain(descriptor)

    monkeypatch.setattr(cache.os, "fsync", synced)
    path = cache.add_to_cache(cache.cache_folder(), "0123", b"content")
    assert seen == [[]]
    assert made(tmp_path) == [path]


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_other_sources_flags_or_targets_are_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler.find_compiler()
    assert found is not None
    fingerprints = [compiler.fingerprint(found), compiler.fingerprint((*found, "-march=x86-64"))]
    compiler.fingerprint.cache_clear()
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-DANYTHING"))
    fingerprints.append(compiler.fingerprint(found))
    assert len(set(fingerprints)) == 3


@needs_compiler
@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the target is an x86")
def test_the_target_is_chosen_with_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = compiler_that(tmp_path, f'echo "$*" >> {tmp_path}/asked; exec gcc "$@"')
    monkeypatch.setenv("CC", f"{asked} -march=x86-64")
    assert library() is not None
    said = (tmp_path / "asked").read_text()
    assert "-march=x86-64" in said
    assert "-march=native" not in said


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_a_compiler_that_fails_is_quoted_once_and_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    says = 'printf "in a file\\nkernels.h:1: error: no such option: $1\\nand more\\n" >&2; exit 1'
    broken = compiler_that(tmp_path, f'[ "$1" = --version ] || {{ {says}; }}')
    monkeypatch.setenv("CC", str(broken))
    assert library() is None
    assert library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (message,) = caplog.messages
    assert message == why_no_kernels()
    assert message.endswith(f"{broken} could not make them: kernels.h:1: error: no such option: -march=native")
    assert made(tmp_path) == []


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_without_a_compiler_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    assert library() is None
    assert library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install gcc" in caplog.text


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_what_a_compiler_says_may_be_in_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    says = "printf 'caf\\351'\n[ \"$1\" = --version ] || { printf 'h\\351las' >&2; exit 1; }"
    monkeypatch.setenv("CC", str(compiler_that(tmp_path, says)))
    assert library() is None
    assert "las" in caplog.text


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_kernels_begun_in_the_background_are_waited_for_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = tmp_path / "gate", tmp_path / "asked"
    waits = f'[ "$1" = --version ] || {{ echo >> {asked}; while [ ! -e {gate} ]; do sleep 0.01; done; }}; exec gcc "$@"'
    monkeypatch.setenv("CC", str(compiler_that(tmp_path, waits)))
    build.begin_build()
    build.begin_build()
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(library) for _ in range(2)]
        wait_until(asked.exists)
        assert not any(load.done() for load in loads), "a run without kernels would have other bits"
        gate.touch()
        assert all(load.result() is not None for load in loads)
    once = asked.read_text()
    forget()
    assert len(made(tmp_path)) == 1
    made(tmp_path)[0].unlink()
    assert library() is not None
    assert asked.read_text() == once * 2


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_what_fails_in_the_background_is_said_where_the_kernels_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = compiler_that(tmp_path, '[ "$1" = --version ] || { echo "error: no room" >&2; exit 1; }')
    monkeypatch.setenv("CC", str(broken))
    build.begin_build()
    assert library() is None
    assert [message.endswith("error: no room") for message in caplog.messages] == [True]


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(("variable", "said"), [(module.SWITCH, "off"), (module.SWITCH, "offf"), ("CC", "gcc '-O3")])
def test_in_the_background_nothing_is_begun_that_is_not_wanted_or_refused(
    variable: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, said)
    build.begin_build()
    assert not build._BEGUN
    assert not (tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nice gcc")
    assert compiler.find_compiler() == ("nice", "gcc")
    assert library() is not None


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_a_compiler_that_is_no_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '-O3")
    with pytest.raises(UserError, match="CC is .* which is not a valid command: No closing quotation"):
        library()


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache.Path, "home", nowhere)
    assert library() is not None
    assert len(list(cache._own_folder().iterdir())) == 1


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_a_package_without_sources_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiler, "_sources", list)
    assert library() is None
    assert "sources are missing from the package" in caplog.text


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("said", ["0", "false", "offf"])
def test_a_switch_that_says_neither_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.SWITCH, said)
    with pytest.raises(UserError, match=f"PROXIMO_KERNELS is '{said}'; it takes on or off"):
        library()


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize("said", ["off", "OFF"])
def test_they_can_be_turned_off(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.SWITCH, said)
    assert library() is None
    assert kernels_for(torch.zeros(1)) is None
    assert describe_environment(device="cpu")["kernels"] is None


def test_a_run_on_a_cpu_notes_which_kernels_it_had() -> None:
    assert describe_environment(device="cpu")["kernels"] == describe_kernels()
    assert describe_environment(device="meta")["kernels"] is None


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_the_doctor_names_the_kernels_or_says_what_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKS["kernels"]().found.startswith(str(describe_kernels()))
    forget()
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    assert "no C compiler was found" in CHECKS["kernels"]().found


@needs_compiler
def test_they_serve_plain_tensors_of_float32_alone() -> None:
    assert kernels_for(torch.zeros(1)) is library()
    assert kernels_for(nn.Parameter(torch.zeros(1))) is library()
    others = (torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, device="meta"))
    assert [kernels_for(each) for each in others] == [None] * 3
    with FakeTensorMode():
        assert kernels_for(torch.zeros(1)) is None


@needs_compiler
def test_who_counts_operators_sees_them_all() -> None:
    with FlopCounterMode(display=False):
        assert kernels_for(torch.zeros(1)) is None


@needs_compiler
def test_gaps_between_rows_are_refused() -> None:
    assert pointer(None) is None
    with pytest.raises(AssertionError, match="rows without gaps"):
        pointer(torch.zeros(4, 4)[:, :2])


@pytest.mark.usefixtures("_anew")
def test_a_compiler_that_does_not_end_is_waited_for_so_long_and_the_run_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow-cc"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    monkeypatch.setattr(module, "find_compiler", lambda: (str(slow),))
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.01)
    assert library() is None
    assert f"{slow} could not make them: " in str(why_no_kernels())
    assert "timed out after 0.01 seconds" in str(why_no_kernels())
