"""Text generation through real processes, beside other engines."""
