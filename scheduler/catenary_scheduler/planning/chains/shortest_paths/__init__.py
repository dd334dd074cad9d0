"""Fastest paths from block to block while servers fill up, the core of GCA."""
