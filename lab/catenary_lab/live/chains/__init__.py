"""Server chains on real processes: an emulated agent for each server."""
