"""Solutions in steps, for process reward models: `steps.py` finds the steps, `examples.py` loads labelled ones."""
