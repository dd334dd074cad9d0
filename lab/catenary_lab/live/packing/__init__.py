"""Running sessions of a real model that move between real agents."""
