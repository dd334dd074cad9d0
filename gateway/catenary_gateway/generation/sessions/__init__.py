"""One generation on its chains: its starts, its limits, and the tokens that come of them."""
