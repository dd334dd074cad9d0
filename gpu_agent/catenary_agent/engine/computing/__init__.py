"""The compute thread, and the choice of the batch it computes next."""
