"""From request to answer: who is refused, what begins, what outgrows its memory, what ends."""
