"""Compiling and loading the kernels: once, into a folder of one's own, and never at the price of a run."""

import logging
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from proximo.checkpoint.environment import describe_environment
from proximo.errors import UserError
from proximo.native import library as module
from proximo.native.library import describe_kernels, kernels_for, library, pointer

needs_compiler = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@pytest.fixture
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled yet, and a home of the test's own."""
    monkeypatch.delenv(module.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = (library, module._own_folder, module._fingerprint, module._version)
    for each in found:
        each.cache_clear()
    yield
    for each in found:
        each.cache_clear()


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
    assert path.name == f"kernels-{described.rpartition(', ')[2]}.so"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    library.cache_clear()
    monkeypatch.setattr(module, "_compile", None)
    assert library() is not None


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "proximo"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert library() is not None
    assert made(tmp_path) == []
    assert stat.S_IMODE(module._own_folder().stat().st_mode) == 0o700


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_other_sources_or_flags_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = describe_kernels()
    module._fingerprint.cache_clear()
    monkeypatch.setattr(module, "_FLAGS", (*module._FLAGS, "-DANYTHING"))
    assert describe_kernels() != before


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_a_compiler_that_fails_is_quoted_once_and_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = compiler_that(tmp_path, '[ "$1" = --version ] || { echo "no such option: $1" >&2; exit 1; }')
    monkeypatch.setenv("CC", str(broken))
    assert library() is None
    assert library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{broken} could not make the kernels" in caplog.text
    assert "no such option: -O3" in caplog.text
    assert made(tmp_path) == []


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_without_a_compiler_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    with caplog.at_level(logging.INFO, "proximo"):
        assert library() is None
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
def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nice gcc")
    assert module._compiler() == ("nice", "gcc")
    assert library() is not None


@pytest.mark.usefixtures("_anew")
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled here")
def test_a_compiler_that_is_no_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '-O3")
    with pytest.raises(UserError, match="CC is .* which is no command: No closing quotation"):
        library()


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_a_library_cut_short_is_made_again(tmp_path: Path) -> None:
    compiler = module._compiler()
    assert compiler is not None
    path = module._folder() / f"kernels-{module._fingerprint(compiler)}.so"
    path.write_bytes(b"\x7fELF")
    assert library() is not None
    assert made(tmp_path) == [path]
    assert path.stat().st_size > 1000


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(module.Path, "home", nowhere)
    assert library() is not None
    assert len(list(module._own_folder().iterdir())) == 1


@needs_compiler
@pytest.mark.usefixtures("_anew")
def test_a_package_without_sources_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_sources", list)
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
