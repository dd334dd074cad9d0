"""Guesses of the next tokens of a session, which a step checks beside the token that is known."""
