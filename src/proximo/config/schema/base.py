"""The base class of all config sections."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from proximo.config.schema.fields import has_kinds
from proximo.config.schema.validation_messages import construction_error
from proximo.errors import ConfigError

NUMBERS = (int, float, int | None, float | None)


class _SectionMeta(type(BaseModel)):
    """Raises ConfigError, with the messages of recipes, when a section is constructed in Python with bad values."""

    if not TYPE_CHECKING:  # a type checker would apply this signature to every section

        def __call__(cls, *arguments: Any, **values: Any) -> Any:
            if arguments:
                advice = f"write {cls.__name__}(**settings)"
                raise ConfigError(f"{cls.__name__} takes its settings by name, got {arguments[0]!r:.60}: {advice}")
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise construction_error(error, cls, values) from error


def _completed(given: Any, default: "Section", has_kinds: bool) -> Any:
    """A subsection as it was given, with what it leaves out from the default of its field."""
    if not isinstance(given, dict):
        return given
    known = default.model_dump(exclude_unset=True)
    if has_kinds:
        known["kind"] = getattr(default, "kind", None)
        if given.get("kind", known["kind"]) != known["kind"]:
            return given
    return {**known, **given}


class Section(BaseModel, metaclass=_SectionMeta):
    """A config section. It is frozen, unknown keys are errors, and a field's docstring is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def conflicts(self) -> Iterator[str]:
        """What does not fit together among the settings, as sentences that say what to do. The first is reported."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for conflict in self.conflicts():
            raise ValueError(conflict)
        return self

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, data: Any) -> Any:
        """Merge a partly given subsection into the default of its field, if it is of the same kind.

        A name alone is the kind of a section that has kinds.
        """
        if not isinstance(data, dict):
            return data
        fields = {name: field for name, field in cls.model_fields.items() if name in data}
        named = {
            name: {"kind": data[name]}
            for name, field in fields.items()
            if isinstance(data[name], str) and has_kinds(field.annotation)
        }
        data = {**data, **named}
        kept = {
            name: _completed(data[name], field.default, has_kinds(field.annotation))
            for name, field in fields.items()
            if isinstance(field.default, Section)
        }
        return {**data, **kept}

    @model_validator(mode="before")
    @classmethod
    def _no_bool_as_number(cls, data: Any) -> Any:
        """Turn bools of numeric fields into text, so that they are refused: Python would accept True as 1."""
        if not isinstance(data, dict):
            return data
        numbers = {name for name, field in cls.model_fields.items() if field.annotation in NUMBERS}
        return {
            name: str(value).lower() if isinstance(value, bool) and name in numbers else value
            for name, value in data.items()
        }
