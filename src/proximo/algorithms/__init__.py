"""The mathematics of training: pure functions on tensors. Imports torch and jaxtyping, and no other part of Proximo.

The annotations state dtype and shape of every tensor; the tests check both (tests/shape_checks.py). One
name stands for one size within a call:

    tokens      T   response tokens of all responses, laid end to end without padding
    responses   R   responses
    states      S   tokens + responses: one state before each token, and one after the last of each response
    pairs       N   preference pairs
    vocab       V   entries of the vocabulary
    *shape          any shape, the same wherever the name stands

Docstrings abbreviate them by the letters.
"""
