"""The check of the address and the token of `proximo serve-reward`. Imports no torch."""

from importlib.util import find_spec

from proximo.errors import ConfigError, MissingExtraError
from proximo.http_client import MIN_TOKEN_CHARACTERS, is_loopback
from proximo.run.preflight import read_secret


def check_options(host: str, *, token_env: str | None, without_token: bool) -> None:
    """Raises MissingExtraError, and ConfigError if other machines could reach the service without a token."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise MissingExtraError(
            "proximo serve-reward needs packages that are not installed: pip install 'proximo[serve]'"
        )
    if token_env is not None and without_token:
        raise ConfigError("--token-env and --without-token exclude each other: choose one")
    if token_env is not None:
        token = read_secret(token_env)
        if len(token) < MIN_TOKEN_CHARACTERS and not is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached from other machines, and the token in the environment variable "
                f"{token_env} has {len(token)} characters: it needs {MIN_TOKEN_CHARACTERS} or more, as from "
                "`openssl rand -hex 16`"
            )
    elif not without_token and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines: name with --token-env the environment variable "
            "that has the token that clients must know, or use --without-token"
        )
