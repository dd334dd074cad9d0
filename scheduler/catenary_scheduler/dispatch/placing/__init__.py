"""SLO-aware placement of sessions on workers (Aladdin, section 4).

jobs         what a session asks of a worker, what a worker is held to
constraints  b-e and Algorithm 1 to the letter
occupancy    who is on a worker: the same by running sums, brought up to date by reports
worker       what one more session would mean there
best_fit     least loaded, fullest (Algorithm 1) or least harm (R14): the decision
adaptation   theta from attainment
lengths      the predictor of answer lengths
rebalancing  Algorithm 2
"""
