"""The baselines PETALS and BPRR, with their placements and routing, and exact response times."""
