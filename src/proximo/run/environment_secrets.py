"""Reads secrets from environment variables that a recipe names. No error message contains a secret."""

import os

from proximo.errors import ConfigError


def secret_problem(variable: str) -> str | None:
    """Why the environment variable gives no token; None if it gives one."""
    value = os.environ.get(variable, "")
    if not value.strip():
        return f"the environment variable {variable} is not set: it should hold the token of the reward service"
    if not value.isascii() or not value.isprintable() or " " in value:
        return f"the environment variable {variable} has blanks or other characters that no token has"
    return None


def read_secret(variable: str) -> str:
    """The token. Raises ConfigError if there is none."""
    if problem := secret_problem(variable):
        raise ConfigError(problem)
    return os.environ[variable]
