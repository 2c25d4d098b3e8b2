"""Models that share weights: adapters over one base (`shared_base.py`), a value head on the policy (`trunk.py`)."""
