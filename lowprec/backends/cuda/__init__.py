"""NVIDIA GPUs: the same plans, executed by cuBLASLt. Loaded with the first array in CUDA memory."""
