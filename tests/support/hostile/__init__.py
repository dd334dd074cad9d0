"""What strangers send, store and run to do harm; what must be refused."""
