"""C kernels for CPUs, for work that torch has no single operator for."""
