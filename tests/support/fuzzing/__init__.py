"""Fuzzing of the HTTP endpoints by schemathesis: `make fuzz`."""
