"""The wheel, built offline and installed alone in an empty environment: what a user gets, and nothing missing."""

import json
import re
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from wheels import ROOT, build_wheel, install_alone, run

SOURCE = ROOT / "src"
PACKAGES = ("proximo", "proximo_cpu", "proximo_cuda", "proximo_verifiers")
"""The import packages of the wheel."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; its dependencies are read from this one, behind everything of its own."""
    folder = tmp_path_factory.mktemp("environment")
    install_alone(wheel, folder)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    # Path files there are not read in turn, so that the editable install of the source does not come along.
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


@pytest.fixture
def empty(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("empty")


def test_the_wheel_holds_every_file_of_the_packages_and_the_licence(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {
        path.relative_to(SOURCE).as_posix()
        for package in PACKAGES
        for path in (SOURCE / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert any(name.startswith("proximo/recipes/") and name.endswith(".yaml") for name in held)
    assert any(name.startswith("proximo/metrics/report/templates/") for name in held)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in held)
    assert {name.partition("/")[0].partition("-")[0] for name in held} == set(PACKAGES)


def test_the_wheel_carries_the_pages_of_the_documentation_without_their_pictures(wheel) -> None:
    docs = SOURCE.parent / "docs"
    with zipfile.ZipFile(wheel) as archive:
        held = {name: info for info in archive.infolist() if (name := info.filename).startswith("proximo/docs/")}
    assert set(held) == {f"proximo/docs/{path.relative_to(docs).as_posix()}" for path in docs.rglob("*.md")}
    assert sum(info.compress_size for info in held.values()) < 500_000


def test_what_the_installed_helps_and_errors_name_can_be_opened(environment, empty) -> None:
    proximo, python = environment / "bin" / "proximo", environment / "bin" / "python"
    commands = re.findall(r"^  ([a-z-]+)  ", run(proximo, "--help", cwd=empty), re.MULTILINE)
    assert {"sft", "kto", "engine", "doctor"} <= set(commands)
    helps = "import sys; from proximo.cli import main; print([main([name, '--help']) for name in sys.argv[1:]])"
    named = [word for word in run(python, "-c", helps, *commands, cwd=empty).split() if "docs/" in word]
    assert len(named) >= 9
    raised = "from proximo.errors import ConfigError; print(ConfigError('see docs/vllm.md'))"
    named += run(python, "-c", raised, cwd=empty).split()[-1:]
    for word in named:
        path = Path(word.strip("().,;:")).expanduser()
        assert path.is_file(), word
        assert path.is_relative_to(environment), word


def test_the_wheel_and_the_citation_say_the_same_of_the_package(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    citation = yaml.safe_load((SOURCE.parent / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == metadata["Version"]
    assert citation["license"] == metadata["License-Expression"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_the_installed_command_works_from_an_empty_folder(environment, empty) -> None:
    proximo = environment / "bin" / "proximo"
    where = run(environment / "bin" / "python", "-c", "import proximo; print(proximo.__file__)", cwd=empty)
    assert Path(where.strip()).is_relative_to(environment)
    assert run(proximo, "--version", cwd=empty).startswith("proximo 0.")
    names = {line.split()[0] for line in run(proximo, "recipes", cwd=empty).splitlines()}
    assert names == {path.stem for path in (SOURCE / "proximo" / "recipes").rglob("*.yaml")}
    assert "ppo:" in run(proximo, "config", "show", "demo", cwd=empty)
    assert list(empty.iterdir()) == []


def test_the_installed_package_finds_its_kernels(environment, empty) -> None:
    """The entry point and the sources in C come along."""
    found = "from proximo.kernels import kernels_of; print(type(kernels_of('cpu')).__module__)"
    sources = "from proximo_cpu.compiler import _sources; print(*(path.suffix for path in _sources()))"
    python = environment / "bin" / "python"
    assert run(python, "-c", found, cwd=empty).strip() == "proximo_cpu.plug_in"
    assert set(run(python, "-c", sources, cwd=empty).split()) == {".c", ".h"}


def test_the_installed_package_writes_a_report(environment, empty) -> None:
    lines = [{"step": step, "sft/loss": 3.0 - step, "progress/step": step} for step in (1, 2)]
    (empty / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(environment / "bin" / "proximo", "report", ".", cwd=empty)
    assert "<svg" in (empty / "report.html").read_text()
