"""Object stores: reading and writing objects, with retries."""
