"""Checks the address of a service without resolving its name, and the name of the variable that holds its token."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def is_address(url: str) -> str:
    """The address. Raises ValueError for another text."""
    if problem := address_problem(url):
        raise ValueError(problem)
    return url


def address_problem(url: str) -> str | None:
    """The reason why `url` is not a service address, or None. The text never quotes a possible password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"not a service address: {error}"
    if "@" in parts.netloc:
        return (
            "the address contains a user or password, which every log would show: put the secret into an environment "
            "variable and name that variable in token_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"\s", url):
        return f"{url!r} is not a service address; an example is http://verifiers:8321"
    if parts.query or parts.fragment:
        return f"{url!r} has a part after '?' or '#': give scheme, host, port and path only"
    return None


def token_variable(name: str) -> str:
    """The name of the environment variable with a service's token. Raises ValueError, which does not quote it.

    What was given instead of a name may be the token itself.
    """
    if not re.fullmatch("[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "token_env is the name of an environment variable (capital letters, digits and '_'), never the token itself"
        )
    return name


ServiceAddress = Annotated[str, AfterValidator(is_address)]
TokenVariable = Annotated[str, AfterValidator(token_variable)]
