"""One file per Hugging Face model family; `..family` lists them."""
