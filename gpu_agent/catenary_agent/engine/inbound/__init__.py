"""Reception of frames and their assembly to complete batches, within a bounded memory."""
