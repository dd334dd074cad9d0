"""All open requests and sessions, the slots they hold, and the tokens in their caches."""
