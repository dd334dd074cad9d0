"""The desired plan, the active plan, and the controller that leads from one to the other."""
