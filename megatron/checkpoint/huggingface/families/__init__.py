"""The tables of the Hugging Face model families; each file has a family and its relatives. `..family` lists
them."""
