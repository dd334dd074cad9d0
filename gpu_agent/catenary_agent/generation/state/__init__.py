"""Sessions, the batchers they queue at, and the events and output of the generation loop."""
