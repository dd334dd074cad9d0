"""Plans for unlike devices on real processes."""
