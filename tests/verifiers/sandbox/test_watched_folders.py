"""Folders of programs where nothing can be mounted: when they are too full, and that they can be removed."""

import os
import subprocess

import pytest

from proximo_verifiers.sandbox.inside import fork_server
from proximo_verifiers.sandbox.kernel.namespaces import MAX_FILES


@pytest.fixture
def folder(tmp_path) -> str:
    """A program's folder."""
    return fork_server.make_folder(fork_server.make_folder_of_folders(str(tmp_path)), 0)


def test_a_folder_is_too_full_by_bytes(folder):
    with open(f"{folder}/a", "wb") as file:
        file.write(bytes(1 << 16))
    assert not fork_server.folder_exceeds(folder, num_bytes=1 << 17)
    os.mkdir(f"{folder}/inner")
    with open(f"{folder}/inner/b", "wb") as file:
        file.write(bytes(1 << 16))
    assert fork_server.folder_exceeds(folder, num_bytes=(1 << 17) - 1)


def test_a_folder_is_too_full_by_files(folder):
    for number in range(MAX_FILES):
        os.mkdir(f"{folder}/{number}")
    assert not fork_server.folder_exceeds(folder, num_bytes=1 << 30)
    os.mkdir(f"{folder}/more")
    assert fork_server.folder_exceeds(folder, num_bytes=1 << 30)


def test_links_to_elsewhere_are_neither_followed_nor_removed(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(1 << 20))
    os.symlink(outside, f"{folder}/link")
    os.symlink(outside / "file", f"{folder}/other")
    assert not fork_server.folder_exceeds(folder, num_bytes=1 << 16)
    fork_server.remove_folder(folder)
    assert (outside / "file").stat().st_size == 1 << 20


def test_what_lies_deeper_than_a_path_can_say_counts_as_too_much_and_is_removed(folder):
    inner = "d" * 200
    make = f"import os\nos.chdir({folder!r})\nfor _ in range(40):\n    os.mkdir({inner!r})\n    os.chdir({inner!r})"
    subprocess.run(["python3", "-c", make], check=True)
    assert fork_server.folder_exceeds(folder, num_bytes=1 << 30)
    fork_server.remove_folder(folder)
    assert not os.path.exists(folder)


def test_closed_folders_are_removed(folder):
    for name in ("a", "a/b", "a/b/c"):
        os.mkdir(f"{folder}/{name}")
    open(f"{folder}/a/b/c/file", "w").close()
    for name in ("a/b/c", "a/b", "a"):
        os.chmod(f"{folder}/{name}", 0)
    fork_server.remove_folder(folder)
    assert not os.path.exists(folder)
