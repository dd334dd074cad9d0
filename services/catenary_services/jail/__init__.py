"""The jail: a child process in which files of strangers are parsed, cut and tried.

`run.run_jailed` starts `python -m catenary_services.jail.child`, which gives up whatever it can
(`confinement`: user, network, system calls, paths, memory, time) before it imports the code that
touches the file. What it answers is bounded bytes, to be checked by whoever asked; the files it
leaves are taken over by `harvest` after a look at names, kinds and sizes. `protections` says what
of all this the kernel at hand offers.
"""
