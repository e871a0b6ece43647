"""Products on 16-bit and 8-bit units. ``executor.prepare`` is the way in; ``micro_kernels`` says what is missing."""
