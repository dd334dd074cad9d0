"""The agents of a cluster: who is there, what they host, and what they are told to load."""
