"""Turns the Python objects of a recipe (functions, rewards, rows, sinks, own sections) into plain values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any

from proximo import session_functions
from proximo.config.schema.base import Section
from proximo.errors import ConfigError
from proximo.metrics.sinks import Sink
from proximo_verifiers.callables import methods_problem

ROWS = ("sources", "evaluation_sources")
"""Keys whose items may be rows."""


class GivenObjects:
    """Turns a recipe with objects into plain values, and stores the objects by name."""

    def __init__(self) -> None:
        self.functions: dict[str, Any] = {}

    def plain(self, value: Any, key: str = "") -> Any:
        """The value at a dotted key of the recipe, with objects replaced. Raises ConfigError for an unusable object."""
        if "kwargs" in key.split("."):
            return _arguments(value)
        name, _, index = key.rpartition(".")
        if not index.isdigit():
            return self._section(value, index)
        return self._item(value, name.rpartition(".")[2])

    def _section(self, value: Any, name: str) -> Any:
        if name == "kwargs" or isinstance(value, Path):
            return _arguments(value)
        if name in ROWS:
            return self._sources(value)
        if name == "sinks" and not isinstance(value, list | tuple | str):
            raise ConfigError(f"run.sinks is a list of sinks, got {value!r:.60}: write [sink], or [] for none")
        if isinstance(value, Section):
            value = _settings(value)
        if isinstance(value, Mapping):
            return {str(each): self._section(item, str(each)) for each, item in value.items()}
        if name in ("reward", "gold") and value is not None:
            sections = self._rewards(value)
            if name == "gold" and len(sections) != 1:
                raise ConfigError(f"gold is one reward, and got {len(sections)}: give one function or source")
            return sections if name == "reward" else sections[0]
        if isinstance(value, list | tuple):
            return [self._item(item, name) for item in value]
        return self._import_path(value) if callable(value) or hasattr(value, "score") else value

    def _item(self, value: Any, name: str) -> Any:
        """An item of the list of that name."""
        if name in ROWS:
            return self._source(value)
        if name == "reward":
            return self._rewards([value])[0]
        return self._sink(value) if name == "sinks" else self._section(value, "")

    def _sources(self, value: Any) -> list[Any]:
        is_list = isinstance(value, list | tuple)
        return [self._source(item) for item in (value if is_list and not _are_rows(value) else [value])]

    def _source(self, source: Any) -> Any:
        items = source.items() if isinstance(source, Mapping) and "function" not in source else ()
        if sets := [name for name, each in items if hasattr(each, "column_names")]:
            raise ConfigError(
                f"a data source is one data set, and this is a mapping of several, {', '.join(map(repr, sets))}: give "
                f"one of them, such as dataset[{sets[0]!r}]"
            )
        if isinstance(source, Mapping):
            plain = {
                str(name): self._section(value, "kwargs" if name == "kwargs" else "")
                for name, value in source.items()
                if name != "function"
            }
            if "function" not in source:
                return plain
            named = source["function"]
            return plain | ({"function": named} if isinstance(named, str) else self._source(named))
        if callable(source):
            return {"function": self._import_path(source)}
        if isinstance(source, str | bytes | Path | Iterator) or not isinstance(source, Iterable):
            raise ConfigError(
                "a data source is a mapping such as {'path': 'rows.jsonl'}, a function that yields rows, or rows that "
                f"can be read again, such as a list or a datasets.Dataset; got {source!r:.60}"
            )
        return {"function": self._import_path(_Rows(source))}

    def _rewards(self, reward: Any) -> list[Any]:
        """Sections of the sources: a function or source, pairs (weight, source) as for `WeightedReward`, mappings."""
        from proximo.rewards.weighted import as_pairs

        return [
            self._section(source, "") if isinstance(source, Mapping) else self._reward(weight, source)
            for weight, source in as_pairs(reward)
        ]

    def _reward(self, weight: float, source: Any) -> dict[str, Any]:
        from proximo.rewards.function import FunctionReward
        from proximo.rewards.function_binding import BoundFunction, function_name
        from proximo.rewards.source import source_problem

        section: dict[str, Any] = {"kind": "function", "weight": weight}
        if isinstance(source, FunctionReward):
            section |= {"kwargs": _arguments(source.kwargs), "timeout_seconds": source.timeout_seconds}
            return section | {"name": source.name, "function": self._import_path(source.function)}
        is_source = hasattr(source, "score") and not isinstance(source, type)
        problem = source_problem(source) if is_source else None if callable(source) else "it cannot be called"
        if problem:
            raise ConfigError(
                "a reward is a function, a source with name and score(responses), a pair (weight, either), or a "
                f"mapping such as {{'kind': 'model', ...}}; got {source!r:.60}: {problem}"
            )
        name = source.name if is_source else function_name(source)
        if not is_source:
            BoundFunction(source, {}, name=repr(name))
        return section | {"name": name, "function": self._import_path(source)}

    def _sink(self, sink: Any) -> Any:
        if isinstance(sink, Mapping):
            return self._section(sink, "")
        if isinstance(sink, type) or (callable(sink) and not hasattr(sink, "write")):
            return {"kind": "function", "function": self._import_path(sink)}
        if problem := methods_problem(sink, ["write(step, metrics)", "close()"]):
            raise ConfigError(
                "a sink is a mapping such as {'kind': 'wandb'}, an object with write(step, metrics) and close(), or a "
                f"function that makes one; got {sink!r:.60}: {problem}"
            )
        return {"kind": "function", "function": self._import_path(_Opened(sink))}

    def _import_path(self, value: Any) -> str:
        return session_functions.import_path(value, self.functions)


class _Rows:
    """Rows as a function that returns them."""

    __name__ = "rows"

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __call__(self) -> Iterable[Mapping[str, Any]]:
        return self._rows

    def __length_hint__(self) -> int:
        number = length_hint(self._rows, -1)
        return NotImplemented if number < 0 else number


class _Opened:
    """A sink as a function that returns it. The run closes it at the end; a later fit writes to it again."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.__name__ = type(sink).__name__

    def __call__(self, run: object) -> Sink:
        del run
        return self._sink


def _arguments(value: Any) -> Any:
    """Arguments of a function as plain values."""
    if isinstance(value, Mapping):
        return {str(name): _arguments(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_arguments(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _settings(section: Section) -> dict[str, Any]:
    """The settings of a section that was made in Python. The `kind` of one of the user's own is its class."""
    settings = {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}
    if "kind" in type(section).model_fields:
        is_shipped = type(section).__module__.startswith("proximo.")
        settings["kind"] = section.model_dump()["kind"] if is_shipped else type(section)
    return settings


def _may_be_row(value: Any) -> bool:
    """Whether it is a mapping, no section of a data source, and no mapping of data sets by their names."""
    if not isinstance(value, Mapping) or {"path", "function"} & set(value):
        return False
    return not any(hasattr(each, "column_names") for each in value.values())


def _are_rows(values: Sequence[Any]) -> bool:
    """Whether a list holds rows itself. A list of sources has mappings with `path` or `function`, or rows as items."""
    return bool(values) and all(map(_may_be_row, values))
