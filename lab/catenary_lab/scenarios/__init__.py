"""Scenario files and their findings.

    schema      the keys all scenarios have; reads files, names what is wrong in them
    kinds       the plug-in of a kind of files: `Kind`, and an `Experiment` for each class
    runner      all jobs of the files together, by a few processes; then a report of each
    report      tables, panels, notes, facts
    record      the same as committed JSON, with commit, settings, date and machine
    figures     single figures of a run, for pages and for what a scenario expects
    output      tables or JSON on the terminal; records and plots (`plots`)
    live        runs on real processes
    data        the places of the data that scenarios name

The folders `pools`, `chains`, `placement` and `packing` are the kinds.
"""
