"""Settings for all tests: one thread, no network, no accelerator-dependent default."""

import os
import signal
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` of a script: tests of Ctrl-C would see none
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

import shape_checks

shape_checks.install()

metadata.version = cache(metadata.version)  # each run asks for those of nine packages, from their files


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thread count changes bits; one thread also keeps parallel test workers from fighting over cores."""
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # a test ran as on CUDA; to turn it off imports the compiler
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the tiny runs. No test changes them."""
    from tiny_runs import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plots take longer than tiny runs."""
    monkeypatch.setattr("proximo.run.journal.write_report", lambda folder: folder / "report.html")


@pytest.fixture
def no_report_no_fsync(no_report: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of models draw nothing, and to lose what is not synced takes power."""
    for name in ("probe_language_model", "probe_scalar_model"):
        monkeypatch.setattr(f"proximo.models.loading.{name}", lambda model: None)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One second of computing for a trial of a chat template."""
    from proximo.data.templates import limits

    monkeypatch.setattr(limits, "CPU_SECONDS", 1)
    limits.try_template.cache_clear()
    yield
    limits.try_template.cache_clear()
