"""Options of `proximo serve-reward` (address, token, limits) and their check. Imports no torch."""

from dataclasses import dataclass
from importlib.util import find_spec

from proximo.errors import ConfigError, MissingExtraError
from proximo.http_client import MIN_TOKEN_CHARACTERS, is_loopback
from proximo.run.preflight import read_secret


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of the command line."""

    host: str = "127.0.0.1"
    port: int = 8321
    token_env: str | None = None
    """The environment variable that holds the token; None for no token."""
    without_token: bool = False
    """Serve anyone who can reach the address, without a token."""
    concurrency: int = 4
    """Requests that are scored concurrently."""
    queue_size: int = 64
    """Waiting requests; further ones get 503 and are retried."""
    request_mib: int = 64
    grace_seconds: int = 25
    """Seconds after a signal in which running requests may finish."""


def check_options(options: ServeOptions) -> None:
    """Raises MissingExtraError, and ConfigError if other machines could reach the service without a token."""
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise MissingExtraError(
            "proximo serve-reward needs packages that are not installed: pip install 'proximo[serve]'"
        )
    if options.token_env is not None and options.without_token:
        raise ConfigError("--token-env and --without-token exclude each other: choose one")
    if options.token_env is not None:
        token = read_secret(options.token_env)
        if len(token) < MIN_TOKEN_CHARACTERS and not is_loopback(options.host):
            raise ConfigError(
                f"--host {options.host} can be reached from other machines, and the token in the environment variable "
                f"{options.token_env} has {len(token)} characters: it needs {MIN_TOKEN_CHARACTERS} or more, as from "
                "`openssl rand -hex 16`"
            )
    elif not options.without_token and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines: name with --token-env the environment variable "
            "that has the token that clients must know, or use --without-token"
        )
