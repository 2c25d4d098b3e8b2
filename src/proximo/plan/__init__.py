"""Memory and work of a run, before anything is loaded. `profiling.py` plans a recipe."""
