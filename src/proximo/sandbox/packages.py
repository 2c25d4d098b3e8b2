"""Packages that programs may import beside the standard library: found among what is installed. Not their mounting."""

import difflib
import os
import re
from collections.abc import Collection
from importlib import metadata

from proximo.errors import SandboxError

MAX_ENTRIES = 200
"""Of the folder that programs import packages from."""
REQUIRED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The name at the beginning of a requirement."""


def find_packages(modules: Collection[str]) -> dict[str, str]:
    """Name in a folder of packages -> where it is, of all that it takes to import these modules: the distributions
    that hold them, and those that these require.

    Raises SandboxError for a module that no installed distribution holds.
    """
    if not modules:
        return {}
    providers = metadata.packages_distributions()
    for module in modules:
        if module not in providers:
            near = difflib.get_close_matches(module, providers, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "install it, or leave it out"
            raise SandboxError(f"no package that is installed here is imported as {module!r}; {hint}")
    found: dict[str, str] = {}
    for name in _with_requirements({each for module in modules for each in providers[module]}):
        found |= _entries(metadata.distribution(name))
    if len(found) > MAX_ENTRIES:
        raise SandboxError(
            f"{', '.join(sorted(modules))} take {len(found)} packages and files, more than {MAX_ENTRIES}"
        )
    return found


def package_problem(modules: Collection[str]) -> str | None:
    """What `find_packages` says of modules that are not there."""
    try:
        find_packages(modules)
    except SandboxError as error:
        return str(error)
    return None


def _with_requirements(names: Collection[str]) -> set[str]:
    """What is not installed is not needed here: on another system, or for an extra."""
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
        matches = (REQUIRED.match(each) for each in required if "extra ==" not in each.replace("extra==", "extra =="))
        waiting += [match[0] for match in matches if match]
    return known


def _entries(distribution: metadata.Distribution) -> dict[str, str]:
    """Folders and modules at the top: neither scripts, which lie elsewhere, nor what installers note."""
    tops = {file.parts[0] for file in distribution.files or ()}
    left_out = {"..", "/", "__pycache__"}
    wanted = [top for top in tops - left_out if not top.endswith((".dist-info", ".egg-info", ".pth"))]
    paths = {top: os.path.realpath(str(distribution.locate_file(top))) for top in sorted(wanted)}
    return {top: path for top, path in paths.items() if os.path.exists(path)}
