"""Sessions and the partitions they wait for, what the ring is told, and what comes out of it."""
