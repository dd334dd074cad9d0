"""What runs while a leader leads: the dispatch loop, periodic work, audits of the book, scaling."""
