"""Kernels in C for CPUs, where torch has no operator that does as much at once."""
