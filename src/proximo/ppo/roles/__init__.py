"""The workers of a run, each with a model, made by `build.py`. Reference and average are in `worker.py`."""
