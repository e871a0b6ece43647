"""Products on the AMX tile units. ``executor.prepare`` is the way in; ``tile_gemm.obstacle`` says what is missing."""
