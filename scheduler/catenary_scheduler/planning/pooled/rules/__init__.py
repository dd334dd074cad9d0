"""Rate tables of one model by whole GPUs, under our own rules."""
