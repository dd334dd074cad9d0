"""A whole cluster on one machine, as processes that are watched and restarted."""
