"""How sessions that move are transferred: what it costs, how much at a time, in which order."""
