"""Who may ask for what, how much at once, and what an endpoint does before conversion."""
