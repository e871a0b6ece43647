"""The backend for NVIDIA GPUs, using cuBLASLt; imported with the first array in CUDA memory."""
