"""Resume fingerprints: what must stay the same for a resumed run to be bit-identical, and the error if it did not.

A resumed run must continue as if it had not been interrupted. Four things decide its bits: the settings, the content
of its inputs, the functions that score, and the environment (versions, threads, kind of processor). Each is saved with
the run and compared.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from proximo.errors import RunFolderError

_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprints:
    """Nested JSON mappings: settings, hashes of inputs and of functions, the environment of `describe_environment`."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    """Hashes of data, tokenizers, and models that are in no checkpoint."""
    environment: Mapping[str, Any]
    functions: Mapping[str, Any] = field(default_factory=dict)
    """Import path of a user-defined reward function or verifier -> hash of its source."""

    def to_json(self) -> dict[str, Any]:
        """The content that a checkpoint saves."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The fingerprints that `to_json` wrote to a checkpoint."""
        return cls(**content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """What may differ on resume: `settings` always, the rest only where a flag allows it."""

    settings: Collection[str] = ()
    """Dotted paths of settings that may differ, with everything below them, for example "run.folder"."""
    environment_settings: Collection[str] = ()
    """Settings that count as environment: where and on how many devices a run works."""
    reward_settings: Collection[str] = ()
    """Settings of the reward sources."""
    allow_different_environment: bool = False
    allow_changed_rewards: bool = False


def check_fingerprints(saved: Fingerprints, current: Fingerprints, permission: Permission | None = None) -> list[str]:
    """Raise RunFolderError that lists every field that differs and may not, with both values.

    An input without a saved hash is not compared. Returns a note for each difference that a flag allowed.
    """
    may = permission or Permission()
    changed = [each for each in differences(saved.config, current.config) if not _covered(each.path, may.settings)]
    of_environment = [each for each in changed if _covered(each.path, may.environment_settings)]
    rest = [each for each in changed if each not in of_environment]
    of_rewards = [each for each in rest if _covered(each.path, may.reward_settings)]
    config = [each for each in rest if each not in of_rewards]
    of_environment += differences(saved.environment, current.environment)
    of_rewards += differences(saved.functions, current.functions)
    # Data is hashed in the order of its use, which these settings decide. If one of them changed, the hash differs even
    # for the same files, so only the setting is reported.
    reordered = any(difference.path == "run.seed" or difference.path.startswith("data.") for difference in changed)
    inputs = [
        line for line in changed_inputs(saved.inputs, current.inputs) if not (reordered and line.startswith("data."))
    ]
    problems = [
        _listing("settings", config, "give them the saved values, or start a run in another folder"),
        _listing("inputs", inputs, "bring the same data and models back, or start a run in another folder"),
        "" if may.allow_changed_rewards else _listing("rewards", of_rewards, _REWARDS_ADVICE),
        "" if may.allow_different_environment else _listing("environment", of_environment, _ENVIRONMENT_ADVICE),
    ]
    if any(problems):
        listed = "\n".join(problem for problem in problems if problem)
        raise RunFolderError(f"the run cannot be resumed with what has changed since.\n{listed}")
    return [
        *(f"resumed with changed rewards: {each}" for each in of_rewards),
        *(f"resumed in another environment: {each}" for each in of_environment),
    ]


_REWARDS_ADVICE = (
    "bring them back; or, if the change is meant, --allow-changed-rewards (in Python allow_changed_rewards=True) "
    "continues, and scores the later steps with the new rewards"
)
_ENVIRONMENT_ADVICE = (
    "bring it back; or --allow-different-environment (in Python allow_different_environment=True) continues, but the "
    "bits may differ from those of an uninterrupted run"
)


def changed_inputs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each input whose hash differs from the saved one."""
    return [str(difference) for difference in differences(saved, current) if difference.before is not _ABSENT]


def relocatable(value: Any, pipeline_folder: str) -> Any:
    """Settings with paths below the pipeline's folder written as `@pipeline/...`, so that the folder can be moved."""
    return _with_prefix(value, f"{pipeline_folder}/", "@pipeline/") if pipeline_folder else value


def relocated(value: Any, pipeline_folder: str) -> Any:
    """The inverse of `relocatable`: settings with `@pipeline/...` replaced by the pipeline's present folder."""
    return _with_prefix(value, "@pipeline/", f"{pipeline_folder}/") if pipeline_folder else value


def _with_prefix(value: Any, old: str, new: str) -> Any:
    """Nested settings in which texts and names that begin with `old` begin with `new`."""
    if isinstance(value, Mapping):
        return {_with_prefix(name, old, new): _with_prefix(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_prefix(part, old, new) for part in value]
    return f"{new}{value.removeprefix(old)}" if isinstance(value, str) and value.startswith(old) else value


def _listing(what: str, lines: Sequence[object], advice: str) -> str:
    """The lines under a heading, with advice; "" if there are no lines."""
    return "\n".join([f"{what} (saved -> now):", *(f"  {line}" for line in lines), f"  {advice}"]) if lines else ""


@dataclass(frozen=True, slots=True)
class _Difference:
    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {_show(self.before)} -> {_show(self.now)}"


def differences(saved: Any, current: Any, path: str = "") -> Iterator[_Difference]:
    """Each value that differs between two nested JSON mappings; as text it reads `run.seed: 0 -> 1`.

    A section that exists on one side only is one difference.
    """
    before, now = _parts(saved), _parts(current)
    if before is None or now is None:
        if saved != current:
            yield _Difference(path, saved, current)
        return
    for name in sorted(before.keys() | now.keys()):
        below = f"{path}.{name}" if path else name
        yield from differences(before.get(name, _ABSENT), now.get(name, _ABSENT), below)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """The items of a section, or of a list of sections by their number; None for a plain value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return None


def _show(value: Any) -> str:
    return value if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _covered(path: str, may_change: Collection[str]) -> bool:
    return any(path == allowed or path.startswith(f"{allowed}.") for allowed in may_change)
