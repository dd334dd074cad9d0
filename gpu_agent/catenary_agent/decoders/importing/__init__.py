"""Brings language models into the repository: in the jail, from files of strangers."""
