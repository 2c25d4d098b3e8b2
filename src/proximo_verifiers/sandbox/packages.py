"""Finds the installed packages that programs may import beside the standard library."""

import difflib
import os
import re
from collections.abc import Collection
from importlib import metadata

from proximo_verifiers.errors import SandboxError

MAX_ENTRIES = 200
"""Largest number of entries in the folder from which programs import packages."""
REQUIRED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The name at the beginning of a requirement."""


def find_packages(modules: Collection[str]) -> dict[str, str]:
    """Maps top-level names to paths, for the distributions of these modules and all that they require.

    Raises SandboxError for a module that no installed distribution provides.
    """
    if not modules:
        return {}
    providers = metadata.packages_distributions()
    for module in modules:
        if module not in providers:
            near = difflib.get_close_matches(module, providers, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "install it, or leave it out"
            raise SandboxError(f"no installed package is imported as {module!r}; {hint}")
    entries: dict[str, str] = {}
    for name in _with_requirements({name for module in modules for name in providers[module]}):
        entries |= _entries(metadata.distribution(name))
    if len(entries) > MAX_ENTRIES:
        raise SandboxError(
            f"{', '.join(sorted(modules))} take {len(entries)} packages and files, more than {MAX_ENTRIES}"
        )
    return entries


def package_problem(modules: Collection[str]) -> str | None:
    """The error of `find_packages` as text, or None."""
    try:
        find_packages(modules)
    except SandboxError as error:
        return str(error)
    return None


def _with_requirements(names: Collection[str]) -> set[str]:
    """The distributions and their requirements. Requirements that are not installed, as for extras, are skipped."""
    known: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in known:
            continue
        try:
            required = metadata.distribution(name).requires or ()
        except metadata.PackageNotFoundError:
            continue
        known.add(name)
        matches = (REQUIRED.match(text) for text in required if "extra ==" not in text.replace("extra==", "extra =="))
        waiting += [match[0] for match in matches if match]
    return known


def _entries(distribution: metadata.Distribution) -> dict[str, str]:
    """The top-level folders and modules of a distribution, without scripts and metadata."""
    tops = {file.parts[0] for file in distribution.files or ()}
    left_out = {"..", "/", "__pycache__"}
    wanted = [top for top in tops - left_out if not top.endswith((".dist-info", ".egg-info", ".pth"))]
    paths = {top: os.path.realpath(str(distribution.locate_file(top))) for top in sorted(wanted)}
    return {top: path for top, path in paths.items() if os.path.exists(path)}
