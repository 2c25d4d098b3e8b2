"""Faster passes on CUDA: kernels in Triton for the fused layers of `proximo_cpu`, plugged in by an entry point.

    plug_in.py      what the core gets: the entry point
    row_kernels.py  work on rows: norms, rotary positions, gates, log-softmax, draws; programs.py has the kernels
    decoder.py      a decoding pass of few kernels

The core never imports this package; it runs without it, slower.
"""
