"""Commands of `catenaryd` that are one module each."""
