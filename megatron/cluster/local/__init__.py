"""What the ranks of one node share: a temporary folder of reports, and the diagnosis of a failure."""
