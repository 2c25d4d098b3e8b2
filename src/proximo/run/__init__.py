"""Takes a task through its run: checks before the start, folder, loop, saves, signals, logs, pushes to the Hub.

Start with `loop.py` and the interface that it drives (`task.py`); `make/` builds models, data and engines.
"""
