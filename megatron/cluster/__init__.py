"""How the processes of a run start, stop and fail: launch, signals, watchdog, rank reports, diagnosis."""
