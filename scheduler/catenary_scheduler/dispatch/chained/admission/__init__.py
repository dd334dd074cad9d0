"""The way from request to answer: what is refused, begins, outgrows its memory, and ends."""
