"""Runs untrusted programs in isolation. `runner.py` starts them; `inside/` runs within the sandbox."""
