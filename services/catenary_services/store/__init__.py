"""The model store: files of model versions, fetched from peers when a partition needs them.

A process that was ordered to load a partition and has an empty model folder asks its peers for the
content record, for the small files, and for those chunks of the large ones that the partition
reads. What it has fetched it passes on. Files that somebody put into the folder are never touched.

    store        what the rest of a process uses: prepares a version, brings chunks, tells progress
    fetching     asks peers for chunks, several at once, and verifies what they send
    serving      answers the requests of peers
    messages     the frames in which both talk
    peers        which peer is asked next, and which is left alone for a while
    window       how many bytes a peer is asked for at a time, beside live traffic
    kept         the fetched files of one version in its folder
    chunk_map    which chunks of a file are here, on disk and shared by processes
    room         the limit of the folder; versions least recently used are dropped
    progress     bytes wanted and fetched, and the rate
"""
