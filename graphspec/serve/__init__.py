"""The OpenAI face: an HTTP server over one engine."""
