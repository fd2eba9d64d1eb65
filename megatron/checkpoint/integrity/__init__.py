"""Checks of untrusted files: names, sizes and digests are verified before they are used."""
