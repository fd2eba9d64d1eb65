"""Start of the processes, signals, exit codes, rank reports, watchdog, preflight, diagnosis."""
