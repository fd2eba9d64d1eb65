"""How the list of layers is cut into pipeline stages."""
