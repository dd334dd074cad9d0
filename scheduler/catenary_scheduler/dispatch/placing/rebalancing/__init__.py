"""Re-balances requests that have not begun (Aladdin, Algorithm 2)."""
