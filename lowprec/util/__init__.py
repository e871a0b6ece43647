"""General utilities: files, fork-safe locks, enumerations, strides, tables."""
