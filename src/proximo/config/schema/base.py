"""The base of every section of a recipe. Not the reading of files: that is loader.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from proximo.errors import ConfigError

NUMBERS = (int, float, int | None, float | None)
SAVED = "settings that a run was saved with"
"""The context of a validation in which what is absent did not exist yet (`saved.py`)."""


@dataclass(frozen=True, slots=True)
class AbsentMeans:
    """What a run did that was saved before the setting existed, where this is not what its default does.

    `floor: Annotated[float, AbsentMeans(0.0)] = 0.1`
    """

    value: Any


class _Told(type(BaseModel)):
    """A section that is made in Python is refused in the words in which a recipe is. Not one within another."""

    if not TYPE_CHECKING:  # a checker would take its signature for that of every section

        def __call__(cls, *arguments: Any, **values: Any) -> Any:
            if arguments:
                came, example = arguments[0], next(iter(getattr(cls, "model_fields", ())), "key")
                advice = f"write {cls.__name__}(**settings)" if isinstance(came, dict) else f"write {example}=..."
                raise ConfigError(f"{cls.__name__} takes its settings by name, got {came!r:.60}: {advice}")
            try:
                return super().__call__(**values)
            except ValidationError as error:
                from proximo.config.schema.validation_messages import refusal  # which needs the sections

                raise refusal(error, cls, values) from error


def _frozen(section: "Section", name: str) -> ConfigError:
    kind = type(section).__name__
    if name not in type(section).model_fields:
        return ConfigError(f"{kind} has no setting {name!r}, and its settings cannot be changed once it is made")
    return ConfigError(
        f"the settings of a {kind} cannot be changed once it is made: make another, "
        f"{kind}(**{{**config.model_dump(exclude_unset=True), {name!r}: ...}})"
    )


class Section(BaseModel, metaclass=_Told):
    """Frozen, and an unknown key is an error. A field's docstring is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:  # a checker would hold every field against their signatures

        def __setattr__(self, name: str, value: Any) -> None:
            """Raises ConfigError: what was checked together stays together."""
            raise _frozen(self, name)

        def __delattr__(self, name: str) -> None:
            """Raises ConfigError, as for a value that is set."""
            raise _frozen(self, name)

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, data: Any) -> Any:
        """A section that is given in part keeps the rest of the default that its field has."""
        if not isinstance(data, dict):
            return data
        kept = {
            name: {**field.default.model_dump(exclude_unset=True), **data[name]}
            for name, field in cls.model_fields.items()
            if isinstance(field.default, Section) and isinstance(data.get(name), dict)
        }
        return {**data, **kept}

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, data: Any) -> Any:
        """Python takes True for 1; as text it is refused where a number is wanted."""
        if not isinstance(data, dict):
            return data
        numbers = {name for name, field in cls.model_fields.items() if field.annotation in NUMBERS}
        return {
            name: str(value).lower() if isinstance(value, bool) and name in numbers else value
            for name, value in data.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _what_absence_meant(cls, data: Any, info: ValidationInfo) -> Any:
        """Only of saved settings. Stands last, since pydantic asks the last one first, and the defaults come after."""
        if info.context != SAVED or not isinstance(data, dict):
            return data
        sections = {name: {} for name, field in cls.model_fields.items() if isinstance(field.default, Section)}
        meant = {
            name: each.value
            for name, field in cls.model_fields.items()
            for each in field.metadata
            if isinstance(each, AbsentMeans)
        }
        return sections | meant | data
