"""The best rate of one model by whole GPUs, under our rules."""
