"""Grammars of answers: the forms that clients give them in, and a process that tries them out."""
