"""Benchmarks: cupyfa beside every peer that imports, in one process, on the same arrays.

``python -m benchmarks.forward`` gives the forward pass, ``python -m benchmarks.host`` the host cost of a call.
"""
