"""Who may ask for what, how much at once, and what a door does before a message is converted."""
