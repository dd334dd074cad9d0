"""Admission: keys, quotas and limits that apply to a request before it is converted."""
