"""Runs transformers models on packed tokens: loading, attention, heads and adapters. Read `language.py` first.

The annotations state dtype and shape of tensors; the tests check both (tests/shape_checks.py). One name is one size
within a call:

    tokens       T   tokens of all sequences of a pass, laid end to end
    sequences    S   sequences of a pass
    responded    N   response tokens among them
    states           responded + sequences: one state before each response token, and one after the last of each
    positions    N   positions with requested scores over the vocabulary
    rows         B   rows of a decoding step, or rows of a matrix that are read
    hidden       D   width of the hidden states
    vocab        V   rows of the output layer
    heads, kv_heads  H, heads of queries, of keys and values; width K is that of one head
    *batch           any leading dimensions

Docstrings abbreviate them by the letters.
"""
