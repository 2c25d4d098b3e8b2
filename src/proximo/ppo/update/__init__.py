"""The updates of a step: epochs of minibatches (`epochs.py`), losses, guards and reports."""
