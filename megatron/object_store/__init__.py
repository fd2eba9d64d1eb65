"""Object stores: reads and writes objects, with retries."""
