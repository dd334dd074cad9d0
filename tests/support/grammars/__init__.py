"""Schemas, models and processes for tests of answers with a grammar."""
