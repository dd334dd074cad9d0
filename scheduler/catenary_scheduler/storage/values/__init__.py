"""The form of values in Redis: the codec, the kinds of records, the tables and their fields."""
