"""Faster passes on a CPU: kernels in C, fused layers and decoding, plugged into Proximo by an entry point.

    plug_in.py          what the core gets: the entry point
    fused_layers.py     decides which models run fused, and runs their layers
    model_reader.py     reads the layers of a model, with the names in families.py
    fused_functions.py  the two autograd functions of a layer, made of operators.py
    attention.py        attention over packed sequences
    decoder.py          decoding by one call of C, whose arguments are in decode_call.py
    row_kernels.py      work on rows: norms, rotary positions, gates, log-softmax, draws, products of few rows; bf16.py
    library.py          the loaded kernels of csrc/; build.py, compiler.py and cache.py make their file

The core never imports this package; it runs without it, slower.
"""
