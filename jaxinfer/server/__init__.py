"""The OpenAI-compatible HTTP server: FastAPI and uvicorn over an `AsyncEngine`, which steps in a thread of its own."""
