"""The agents of a cluster: which are there, what they host, and what they are told to load."""
