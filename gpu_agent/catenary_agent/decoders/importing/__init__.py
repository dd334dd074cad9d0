"""Import of language models into the repository; files of strangers are read in the jail."""
