"""Other libraries' switches for float32 products: a file a library, each with the controller that sets them."""
