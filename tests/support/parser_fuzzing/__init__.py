"""Fuzzing of every parser that reads bytes from outside or of a peer: `make fuzz-parsers`.

* `target` is one parser, and what it may do with any bytes: return, or raise its own errors, in
  little time and memory.
* `wire`, `doors`, `bodies`, `model_files` and `stored` are the targets.
* `corpus` keeps inputs: those that reach most of the code, and those that once broke a parser.
* `guided` searches for more with atheris, in an environment of its own.
"""
