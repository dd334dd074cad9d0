"""The faults themselves, a class each, by what they strike."""
