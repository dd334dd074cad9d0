"""Rivals of the policies that decide on which GPU sessions live, and their names in scenarios.

baselines        best fit and worst fit
load_balancing   worst fit with moves that make loads even
policies         all of them and Mell's, by name
"""
