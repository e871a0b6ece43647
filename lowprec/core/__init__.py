"""A call of `matmul`, from its arguments to its result."""
