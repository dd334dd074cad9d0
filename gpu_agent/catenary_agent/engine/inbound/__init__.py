"""From frames to complete batches, within the memory there is for them."""
