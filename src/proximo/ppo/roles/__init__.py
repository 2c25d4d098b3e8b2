"""The workers of a run, each with a model: policy, value, reward; in `worker.py` reference and average. See `build.py`."""
