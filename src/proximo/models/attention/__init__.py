"""Attention over packed rows and over the key-value cache. Read `packed.py` first, then `cache.py`."""
