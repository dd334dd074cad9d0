"""One call: its messages, where it goes, its attempts, and the errors it raises."""
