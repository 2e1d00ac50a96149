"""Micro-kernels whose results on an H200 are kept, so that the emulator can be compared with them for ever.

``case.py`` says what a case is and ``ptx.py`` writes its kernel; one module per family of instructions holds the cases;
``families.py`` lists them. ``hardware.py`` runs a case on a GPU, ``emulated.py`` on the emulator, ``goldens.py`` is the
program that makes the goldens, ``golden.py`` their format and the comparison. ``assemble.py`` checks every kernel with
ptxas, without a GPU.
"""
