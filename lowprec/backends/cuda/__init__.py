"""The backend for NVIDIA GPUs, by cuBLASLt; imported with the first array in CUDA memory."""
