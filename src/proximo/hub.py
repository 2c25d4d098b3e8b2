"""Names on the Hugging Face Hub: whether a name is a local path, and whether the Hub answers. Loads no Hub library.

A mistyped folder must not be looked up on the Hub: that takes long, and the answer says nothing about the folder.
Without a network the Hub's libraries try again for a minute, so the Hub is asked once.
"""

import difflib
import os
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

HUB_NAME = re.compile(r"(?!.*(?:--|\.\.))(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?", re.ASCII)
LONGEST_HUB_NAME = 96
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")
"""A folder with a tokenizer holds at least one of these files."""
UNNAMED_TOKENIZER = "of this process"
"""The name in messages of a tokenizer that was not loaded from a folder or the Hub."""
ANSWER_SECONDS = 5.0
"""Seconds that the Hub may take to answer."""
HOLDS_SECONDS = 60.0
"""Seconds for which the Hub is not asked again."""
_asked: dict[str, tuple[float, bool]] = {}
"""By address: when it was asked, and whether it answered."""


def is_hub_name(name: str) -> bool:
    """Whether the Hub may have a model or data set of this name: `name` or `owner/name`."""
    return len(name) <= LONGEST_HUB_NAME and not name.endswith(".git") and HUB_NAME.fullmatch(name) is not None


def is_local(name: str) -> bool:
    """True for a name that must be on this machine.

    It exists, is spelt as a path, begins with a folder that exists, or nearly matches one: `modles/sft` if there is a
    `models/sft`. A name that was loaded from the Hub before is a Hub name, even if such folders exist.
    """
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or not is_hub_name(name):
        return True
    owner, slash, _ = name.partition("/")
    return bool(slash) and (Path(owner).is_dir() or nearest_path(name) is not None) and not _in_cache(name)


def not_there(name: str, kind: str = "folder") -> str:
    """The message for a missing local name, with the nearest existing name.

    A name of the Hub that looks like a folder here counts as the Hub's once it was downloaded (`is_local`).
    """
    nearest = nearest_path(name)
    hint = "" if nearest is None else f"; did you mean {nearest}?"
    if kind == "folder" and "/" in name and is_hub_name(name):
        hint += f" (if the Hub has it: `hf download {name}` first)"
    return f"there is no {kind} {name} (seen from {Path.cwd()}){hint}"


def nearest_path(name: str) -> str | None:
    """The existing path most similar to `name`, part by part; None if a part is similar to nothing."""
    path = Path(name).expanduser()
    nearest = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (nearest / part).exists():
            try:
                beside = sorted(entry.name for entry in nearest.iterdir())
            except OSError:
                return None
            near = difflib.get_close_matches(part, beside, n=1, cutoff=0.6)
            if not near:
                return None
            part = near[0]  # noqa: PLW2901
        nearest /= part
    return str(nearest) if nearest.exists() else None


def _in_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    flat = name.replace("/", "--")
    return any((cache / f"{kind}--{flat}").is_dir() for kind in ("models", "datasets"))


@contextmanager
def within_reach(name: str) -> Generator[None]:
    """Inside, names of the Hub are loaded only from the cache if the Hub does not answer."""
    if is_local(name) or _answers():
        yield
        return
    from huggingface_hub import constants

    switches = [(constants, "HF_HUB_OFFLINE")]
    if "datasets" in sys.modules:
        switches.append((sys.modules["datasets"].config, "HF_HUB_OFFLINE"))
    before = [getattr(module, switch) for module, switch in switches]
    for module, switch in switches:
        setattr(module, switch, True)
    try:
        yield
    finally:
        for (module, switch), value in zip(switches, before, strict=True):
            setattr(module, switch, value)


def _answers() -> bool:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return True  # the user said so: the libraries need no help
    at, answered = _asked.get(constants.ENDPOINT, (float("-inf"), True))
    if time.monotonic() - at > HOLDS_SECONDS:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
            answered = True
        except Exception:  # of the client's library, which is another in other versions; any status is an answer
            answered = False
        _asked[constants.ENDPOINT] = (time.monotonic(), answered)
    return answered
