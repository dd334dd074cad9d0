"""The jail: a child process in which files of strangers are parsed, cut and tried.

`run.run_jailed` starts `python -m catenary_services.jail.child`, which gives up every right it can
(`confinement`: user, network, system calls, paths, memory, time) before it imports the code that
touches the file. Its answer is a bounded number of bytes, to be checked by whoever asked. `harvest`
takes over the files it leaves, after checking names, kinds and sizes. `resident` keeps such a
process, for orders to come. `protections` says which of these means the kernel of this machine
offers.
"""
