"""One file per Hugging Face model family; `..registry` lists them."""
