"""Files of a run: written at once or not at all, here or in a bucket."""
