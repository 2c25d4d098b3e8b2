"""Faster passes on CUDA: kernels in Triton, plugged into Proximo by an entry point.

    plug_in.py        what the core gets: the entry point
    decoder.py        a decoding pass of few kernels, and the fused layers of `proximo_cpu` on a device
    cache_kernels.py  new tokens that are written to the cache and attend to their rows
    row_kernels.py    work on rows: norms, rotary positions, gates, log-softmax; programs.py has the kernels
    sampling.py       draws
    graphs.py         graphs of passes
    needs.py          whether Triton is there, and kernels are right

The core never imports this package; it runs without it, slower. Each kernel is compared with torch's operators on the
device before it is used.
"""
