"""Loading, measuring and unloading of partitions by order of the scheduler."""
