"""The Python interface: `Training` runs a recipe (`training.py`), `SavedRun` reads its results (`saved_run.py`)."""
