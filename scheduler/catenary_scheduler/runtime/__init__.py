"""The running work of a leader: dispatch loop, periodic tasks, audits of the book, and scaling."""
