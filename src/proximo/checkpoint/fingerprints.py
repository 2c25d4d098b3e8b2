"""What must stay the same for a resumed run to have the same bits, and the refusal when it did not."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from proximo.errors import RunFolderError

_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprints:
    """Three JSON mappings, nested at will: settings, inputs, and the environment of `describe_environment`."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    """Data, tokenizers, and models that no checkpoint holds."""
    environment: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """For the state of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """From the state of a checkpoint."""
        return cls(config=content["config"], inputs=content["inputs"], environment=content["environment"])


def check_fingerprints(
    saved: Fingerprints,
    current: Fingerprints,
    *,
    may_change: Collection[str] = (),
    allow_different_environment: bool = False,
) -> None:
    """Raise RunFolderError that lists every field that differs, with both values.

    may_change: dotted paths of settings that may differ, each with all that lies below it, such as "run.folder".
    """
    config = [line for path, line in _differences(saved.config, current.config) if not _covered(path, may_change)]
    inputs = [line for _, line in _differences(saved.inputs, current.inputs)]
    environment = [line for _, line in _differences(saved.environment, current.environment)]
    problems = []
    if config:
        problems.append(_listing("settings", config, "give them the saved values, or start a run in another folder"))
    if inputs:
        advice = "bring the same data and models back, or start a run in another folder"
        problems.append(_listing("inputs", inputs, advice))
    if environment and not allow_different_environment:
        advice = "--allow-different-environment goes on, but the bits may differ from those of an uninterrupted run"
        problems.append(_listing("environment", environment, advice))
    if problems:
        raise RunFolderError("the run cannot be resumed with what has changed since.\n" + "\n".join(problems))


def place_free(value: Any, pipeline_folder: str) -> Any:
    """Settings in which paths below the pipeline's folder begin with `@pipeline`, so that the folder may be moved."""
    if isinstance(value, Mapping):
        return {name: place_free(part, pipeline_folder) for name, part in value.items()}
    if isinstance(value, list):
        return [place_free(part, pipeline_folder) for part in value]
    if isinstance(value, str) and pipeline_folder and value.startswith(f"{pipeline_folder}/"):
        return f"@pipeline/{value.removeprefix(f'{pipeline_folder}/')}"
    return value


def _listing(what: str, lines: list[str], advice: str) -> str:
    return "\n".join([f"{what} (saved -> now):", *(f"  {line}" for line in lines), f"  {advice}"])


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    paths = sorted(before.keys() | now.keys())
    pairs = [(path, before.get(path, _ABSENT), now.get(path, _ABSENT)) for path in paths]
    return [(path, f"{path}: {_show(old)} -> {_show(new)}") for path, old, new in pairs if old != new]


def _leaves(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _show(value: Any) -> str:
    return value if value is _ABSENT else json.dumps(value)


def _covered(path: str, may_change: Collection[str]) -> bool:
    return any(path == allowed or path.startswith(f"{allowed}.") for allowed in may_change)
