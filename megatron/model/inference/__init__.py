"""The model without training: generated text, scored texts, in one process or on a layout."""
