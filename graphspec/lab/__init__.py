"""The latency lab: what the commands ``profile``, ``plan``, ``tune`` and ``report`` do."""
