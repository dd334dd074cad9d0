"""Measurements of agents and links: how long they take, how busy, slow or stuck they are."""
