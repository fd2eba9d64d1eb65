"""One file per Hugging Face model family and its relatives; `..family` lists them."""
