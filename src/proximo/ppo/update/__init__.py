"""The updates of a step: epochs of minibatches with their reports (`epochs.py`), losses, guards, and texts beside."""
