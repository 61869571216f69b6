"""One program per bucket: stages put together, compiled or captured, launched and read."""
