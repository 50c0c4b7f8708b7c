"""Load for any OpenAI-compatible endpoint or an engine in this process, and what became of it."""
