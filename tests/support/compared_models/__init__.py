"""Models that are imported, run and compared with their own libraries, for docs/families.md."""
