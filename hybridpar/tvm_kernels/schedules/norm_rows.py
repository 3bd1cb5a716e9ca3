"""How rows of BatchNorm's tensors are walked, which kernels (`norm.py`) and their callers agree on.

A tensor is read as rows (one pixel of one image) of channels. Rows that are no multiple of a vector are read several at
a time, as one wide row; what is left over is less than a wide row. Wide rows are divided into segments, by the shape
alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

#: Wide rows whose sums are float32.
CHUNK = 128

#: Wide rows that are summed at a time, so that sums are read and written less often.
ROWS = 4

#: Phases of a call, added up. REDUCE and APPLY run over segments; JOIN runs once in between. With TRACK it moves the
#: running statistics; with FIXED it takes them in place of the batch's, and backward takes them as constants.
REDUCE, JOIN, APPLY, FIXED, TRACK = 1, 2, 4, 8, 16

#: Rows of the table that forward leaves for backward, each repeated to a wide row of float32. REST is what the float32
#: of MEAN lacks; VARIANCE is the unbiased one.
MEAN, SCALE, SHIFT, INVERSE, REST, VARIANCE = range(6)
TABLE_ROWS = 6

#: Doubles of scratch for each column of a wide row: per segment, and once.
SEGMENT, SHARED = 4, 3

ACTIVATIONS = ("none", "relu", "relu6", "silu")
