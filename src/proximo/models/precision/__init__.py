"""Device, precision and casts of passes. Read `placement.py` first, then `compute.py`."""
