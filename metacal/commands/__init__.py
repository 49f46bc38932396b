"""One module for each command of `metacal`; the only place that prints results and reads the command line."""
