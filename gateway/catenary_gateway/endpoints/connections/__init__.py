"""HTTP connections: requests to infer are read and answered here, all others by aiohttp."""
