"""What `hybridpar/compress/kernels/factors_source.py` has kernels for; that file is not imported, as it imports TVM."""

#: Rows of factors.
RANKS = (1, 2, 3, 4)
