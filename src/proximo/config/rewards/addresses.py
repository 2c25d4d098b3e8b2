"""Checks addresses of reward services, without resolving names."""

import ipaddress
import re
from urllib.parse import urlsplit


def address_problem(url: str) -> str | None:
    """Why `url` is not the address of a service; None if it is. The message quotes nothing that may be a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"no address of a service: {error}"
    if "@" in parts.netloc:
        return (
            "the address has a user or password in it, which every log would show: put the secret into an environment "
            "variable and its name into token_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"\s", url):
        return f"{url!r} is no address of a service: one such as http://verifiers:8321 is wanted"
    if parts.query or parts.fragment:
        return f"{url!r} has a part after '?' or '#': only scheme, host, port and path are wanted"
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
