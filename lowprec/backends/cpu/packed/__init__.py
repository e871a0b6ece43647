"""Products by packed kernels; ``packed_products.prepare`` is the entry point."""
