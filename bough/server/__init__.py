"""The server: Ollama, OpenAI and Anthropic clients, one tree. Each API is a thin translation to one kind of request."""
