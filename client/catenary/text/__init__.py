"""Text generation: what is asked, what comes back, and answers that come in pieces."""
