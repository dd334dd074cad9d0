"""Planning problems, stored tables, and dispatchers in virtual time: no peers."""
