"""Tensor-core arithmetic, bit by bit."""
