"""The best rate of one model under our rules, and under those of PPipe's artifact."""
