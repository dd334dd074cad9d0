"""Layers of Llama's form in few kernels, which replace those of `transformers` on CUDA devices."""
