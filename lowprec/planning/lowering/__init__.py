"""From a plan to the arguments of cuBLASLt."""
