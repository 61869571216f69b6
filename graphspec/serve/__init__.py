"""``graphspec serve``: an HTTP server with OpenAI's protocol over one engine."""
