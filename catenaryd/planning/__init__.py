"""`catenaryd plan`: plans from files."""
