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
) -> list[str]:
    """Raise RunFolderError that lists every field that differs, with both values.

    may_change: dotted paths of settings that may differ, each with all that lies below it, such as "run.folder". An
    input that was not yet looked at when the run was saved cannot be compared, and is let through.
    Returns what differs in the environment, where that is allowed.
    """
    changed = [
        difference
        for difference in _differences(saved.config, current.config)
        if not _covered(difference.path, may_change)
    ]
    config = [str(difference) for difference in changed]
    # Rows are hashed in the order of their use, which these settings decide: then it is they that are told.
    reordered = any(difference.path == "run.seed" or difference.path.startswith("data.") for difference in changed)
    inputs = [
        line for line in changed_inputs(saved.inputs, current.inputs) if not (reordered and line.startswith("data."))
    ]
    environment = [str(difference) for difference in _differences(saved.environment, current.environment)]
    problems = []
    if config:
        problems.append(_listing("settings", config, "give them the saved values, or start a run in another folder"))
    if inputs:
        advice = "bring the same data and models back, or start a run in another folder"
        problems.append(_listing("inputs", inputs, advice))
    if environment and not allow_different_environment:
        advice = (
            "bring it back; or --allow-different-environment goes on, but the bits may differ from those of an "
            "uninterrupted run"
        )
        problems.append(_listing("environment", environment, advice))
    if problems:
        raise RunFolderError("the run cannot be resumed with what has changed since.\n" + "\n".join(problems))
    return environment


def changed_inputs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A line for each input that differs from what was saved of it."""
    return [str(difference) for difference in _differences(saved, current) if difference.before is not _ABSENT]


def place_free(value: Any, pipeline_folder: str) -> Any:
    """Settings in which paths below the pipeline's folder begin with `@pipeline`, so that the folder may be moved."""
    if isinstance(value, Mapping):
        return {place_free(name, pipeline_folder): place_free(part, pipeline_folder) for name, part in value.items()}
    if isinstance(value, list):
        return [place_free(part, pipeline_folder) for part in value]
    if isinstance(value, str) and pipeline_folder and value.startswith(f"{pipeline_folder}/"):
        return f"@pipeline/{value.removeprefix(f'{pipeline_folder}/')}"
    return value


def placed(value: Any, pipeline_folder: str) -> Any:
    """What `place_free` was given, for the folder where the pipeline is now."""
    if isinstance(value, Mapping):
        return {placed(name, pipeline_folder): placed(part, pipeline_folder) for name, part in value.items()}
    if isinstance(value, list):
        return [placed(part, pipeline_folder) for part in value]
    if isinstance(value, str) and pipeline_folder and value.startswith("@pipeline/"):
        return f"{pipeline_folder}/{value.removeprefix('@pipeline/')}"
    return value


def _listing(what: str, lines: list[str], advice: str) -> str:
    return "\n".join([f"{what} (saved -> now):", *(f"  {line}" for line in lines), f"  {advice}"])


@dataclass(frozen=True, slots=True)
class _Difference:
    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {_show(self.before)} -> {_show(self.now)}"


def _differences(saved: Any, current: Any, path: str = "") -> Iterator[_Difference]:
    """Each value that differs; of a section that is there on one side only, the whole section at once."""
    before, now = _parts(saved), _parts(current)
    if before is None or now is None:
        if saved != current:
            yield _Difference(path, saved, current)
        return
    for name in sorted(before.keys() | now.keys()):
        below = f"{path}.{name}" if path else name
        yield from _differences(before.get(name, _ABSENT), now.get(name, _ABSENT), below)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Of a section, and of a list of sections, whose items go by number; None for a value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return None


def _show(value: Any) -> str:
    return value if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _covered(path: str, may_change: Collection[str]) -> bool:
    return any(path == allowed or path.startswith(f"{allowed}.") for allowed in may_change)
