"""SLO-aware placement of sessions on workers (Aladdin, section 4).

jobs         the needs of a session, the limits of a worker
constraints  constraints b-e and Algorithm 1 to the letter
occupancy    the sessions on a worker: the same by running sums, updated by reports
worker       what one more session would mean there
added_time   by how much one more session would delay the ends of all, its own included
best_fit     least loaded, fullest (Algorithm 1) or least harm (R14): the decision
adaptation   theta from attainment
lengths      the predictor of answer lengths
rebalancing  Algorithm 2
"""
