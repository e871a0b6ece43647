"""Functions and classes of no layer: files, enumerations, strides, tables."""
