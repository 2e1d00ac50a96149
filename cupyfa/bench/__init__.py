"""Benchmarks: cupyfa beside every peer that imports, in one process, on the same arrays.

``python -m cupyfa bench forward`` gives the forward pass, and ``python -m cupyfa bench --help`` lists the others.
"""
