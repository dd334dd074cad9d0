"""`catenaryd simulate`: what a plan would serve, on a virtual clock."""
