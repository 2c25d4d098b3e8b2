"""Samples responses from the policy. Read `engine.py` (the interface) first, then `local.py` and `sampling.py`."""
