"""Every pipeline that keeps the SLO, and the best rate of a model by whole GPUs."""
