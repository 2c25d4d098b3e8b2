"""Silencing what transformers prints while it loads and saves. Not the handling of its errors."""

from collections.abc import Generator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Generator[None]:
    """No progress bars, warnings or load reports inside; afterwards everything is as it was."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
