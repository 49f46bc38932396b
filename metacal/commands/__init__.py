"""One module for each command of `metacal`: it reads the command line and calls what does the work."""
