"""Ctrl-C while the command line is being loaded: it ends the process at once, without a traceback.

Loading begins with the package itself, before any command can catch an interrupt. Only where the process was started as
the command: in a program or a notebook that imports Proximo, signals are not touched.
"""

# The part in C. What `signal` adds takes some milliseconds to import, and an interrupt within them is a traceback.
import _signal as signal  # ty: ignore[import-not-found]
import sys


def is_command() -> bool:
    """Whether this process was started as `proximo` or as `python -m proximo`."""
    given = sys.orig_argv
    as_module = "-m" in given and given[given.index("-m") + 1 :][:1] == ["proximo"]
    return as_module or (bool(sys.argv) and sys.argv[0].replace("\\", "/").rpartition("/")[2] == "proximo")


def end_silently() -> None:
    """From now on, an interrupt ends the process, unless another handler was set."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class EndsSilently:
    """Inside, an interrupt ends the process, because imports may turn a KeyboardInterrupt into another error."""

    def __enter__(self) -> None:
        end_silently()

    def __exit__(self, *_: object) -> None:
        raise_again()


def raise_again() -> None:
    """From now on, an interrupt is a KeyboardInterrupt, Python's default, unless another handler was set."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
