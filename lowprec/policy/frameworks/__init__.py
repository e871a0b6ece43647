"""Controllers of other libraries' switches for float32 products, one file per library."""
