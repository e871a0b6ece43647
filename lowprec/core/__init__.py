"""``matmul``, ``plan`` and ``prepare``: argument checks, the executor cache and stream order."""
