"""The sections of reward sources, one class for each kind. `kinds.py` is the union of them."""
