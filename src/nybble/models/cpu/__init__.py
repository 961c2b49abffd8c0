"""Fused elementwise passes of the models for CPUs, in numba: one pass over memory where torch makes a dozen.

Each takes and returns FP32 tensors without gradient; the autograd functions that call them are beside the
plain formulas. Sums over rows are split at fixed places, so that results do not depend on the number of
threads. NaN goes through.
"""
