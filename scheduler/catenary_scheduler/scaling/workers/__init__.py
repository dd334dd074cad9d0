"""How many workers a model should have, and which agents these are."""
