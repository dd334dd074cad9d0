"""Election of a leader for each group, the parts of a leader, and takeover by the next one."""
