"""Random problems for the kernels, over all arguments: ``make gpu-fuzz``.

`generators.py` says what there is to draw from, `runner.py` draws, computes and compares. A problem is a function of
the seed and of its number, so that any one of a run can be had again, alone. Kernels are few, and are taken in turns.
"""
