"""Secrets that are in the environment, under names that a recipe says. No message of this file has one in it."""

import os

from proximo.errors import ConfigError


def secret_problem(variable: str) -> str | None:
    """Why the environment variable has no token; None where it has one."""
    value = os.environ.get(variable, "")
    if not value.strip():
        return f"the environment variable {variable} is not set: it should have the token of the reward service"
    if not value.isascii() or not value.isprintable() or " " in value:
        return f"the environment variable {variable} has blanks or other characters that no token has"
    return None


def read_secret(variable: str) -> str:
    """The token. Raises ConfigError where there is none."""
    if problem := secret_problem(variable):
        raise ConfigError(problem)
    return os.environ[variable]
