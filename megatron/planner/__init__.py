"""What a run costs, by arithmetic alone: nothing here needs torch or a process group."""
