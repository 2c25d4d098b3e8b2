"""Mathematical answers: found in a text, read by an exact grammar, and compared. `verifier.py` is the way in."""
