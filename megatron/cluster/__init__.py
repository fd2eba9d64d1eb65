"""What a run needs around it on a cluster: start, signals, exit codes, reports, watchdog, diagnosis."""
