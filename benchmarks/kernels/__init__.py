"""Why: what kernels promise is measured per shape, against torch at its best, beside what memory allows."""
