"""Which sessions should be on which chain, epoch by epoch (Mell)."""
