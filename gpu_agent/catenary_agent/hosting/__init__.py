"""Loading and unloading partitions, as the scheduler orders, and measuring them."""
