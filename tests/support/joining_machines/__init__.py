"""Hosts and machines of tests of joining."""
