"""Files that anybody may have written: names, sizes and digests are checked before they are used."""
