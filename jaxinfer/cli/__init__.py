"""The command line: flags, files and terminals around the Python door."""
