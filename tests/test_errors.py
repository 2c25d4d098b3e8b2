"""Messages without secrets, and what a library's error means."""

import errno

import pytest

from proximo import errors
from proximo.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    ProximoError,
    SandboxError,
    TrainingError,
    as_own_errors,
    disk_refused,
    memory_ran_out,
    redacted,
)
from proximo_verifiers import errors as verifiers


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pass@host/x?token=abc is no", "http://***@host/x?*** is no"),
        ("'me:pass@host:80' is no address", "'***@host:80' is no address"),
        ("postgresql://me:pass@host/db", "postgresql://***@host/db"),
        ("hf://name@host/x#abc", "hf://***@host/x#abc"),
        ("hf://name@host/x#access_token=abc", "hf://***@host/x#***"),
        ("https://host/x#id=1&code=abc", "https://host/x#***"),
        ("https://host/x#ghp_16C7e42F292c6912E7710c838347Ae178B4a, or", "https://host/x#*** or"),
        ("https://host/f#123e4567-e89b-12d3-a456-426614174000", "https://host/f#***"),
        ("https://host/f#!kXsFwPzBqRmLtYvUcDnE", "https://host/f#***"),
        ("https://host/f#hf_abcdefghijklmnopqrstuvwxyz", "https://host/f#***"),
        ("https://host/f?q=1#anchor", "https://host/f?***"),
        ("verifiers:8321/x?api_key=abc&n=1", "verifiers:8321/x?api_key=***&n=1"),
        ("override reward.0.token=abc: no key", "override reward.0.token=*** no key"),
    ],
)
def test_what_may_be_a_secret_in_an_address_is_in_no_message(text: str, shown: str) -> None:
    assert str(ConfigError(text)) == redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "write run.seed=1, line 3, column 4: @sft",
        "tests/a.py::b@c",
        "pad_token=3, eos_token=4 and key=value",
        "http://verifiers:8321 does not answer",
        "somebody@example.org",
        "see https://host/docs/library.html#your-own-optimizer-and-schedule, or 'https://host/a.py#L10-L20'",
        "https://host/paper#section.2.1",
        "https://host/page#top",
        "function rewards:score (seen from /home/me)",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_errors_of_libraries_are_read_for_what_the_system_said() -> None:
    assert disk_refused(Exception("No space left on device (os error 28)"))
    assert disk_refused(OSError(errno.EFBIG, "File too large"))
    assert not disk_refused(OSError(errno.EINVAL, "Invalid argument"))
    assert not disk_refused(ValueError("28"))
    assert memory_ran_out(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"))
    assert not memory_ran_out(RuntimeError("shapes differ"))
    wrapped = ValueError("cannot be read")
    wrapped.__cause__ = MemoryError()
    assert memory_ran_out(wrapped)


@pytest.mark.parametrize(
    ("theirs", "own", "status"),
    [
        (verifiers.ConfigError, ConfigError, 2),
        (verifiers.DataError, DataError, 2),
        (verifiers.MissingExtraError, MissingExtraError, 2),
        (verifiers.SandboxError, SandboxError, 1),
        (verifiers.WorkersError, TrainingError, 1),
    ],
)
def test_an_error_of_the_verifiers_becomes_the_own_one_with_its_exit_status(
    theirs: type[Exception], own: type[ProximoError], status: int
) -> None:
    with pytest.raises(own, match="^docs/no-page.md: no worker$") as caught, as_own_errors():
        raise theirs("docs/no-page.md: no worker")
    assert caught.value.exit_status == status
    with pytest.raises(own) as again, as_own_errors():
        raise caught.value
    assert again.value is caught.value


def test_no_error_of_the_verifiers_is_left_out() -> None:
    kinds = {each for each in vars(verifiers).values() if isinstance(each, type) and issubclass(each, Exception)}
    assert set(errors._OWN) == kinds - {verifiers.VerifierError}
