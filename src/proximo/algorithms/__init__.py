"""The mathematics of training: pure functions on tensors, without imports from the rest of Proximo.

Read `advantages.py`, `objectives.py` and `losses.py` first; `masking.py` defines the layout of tensors.

The annotations state dtype and shape of every tensor; the tests check both (tests/shape_checks.py). One
name stands for one size within a call:

    tokens      T   response tokens of all responses, laid end to end without padding
    responses   R   responses
    states      S   tokens + responses: one state before each token, and one after the last of each response
    pairs       N   preference pairs
    vocab       V   entries of the vocabulary
    *shape          any shape, the same everywhere in a call

Docstrings abbreviate them by the letters.
"""
