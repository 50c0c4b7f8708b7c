"""Several engines behind one OpenAI endpoint, on Ray Serve (extra ``ray``)."""
