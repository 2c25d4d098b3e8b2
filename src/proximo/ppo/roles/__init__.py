"""The workers of a run, each with a model: policy, value, reference, reward, average. `build.py` makes them."""
