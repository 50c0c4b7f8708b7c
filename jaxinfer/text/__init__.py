"""Text in and out: tokenizers, chat templates, the stream decoder and stop strings."""

from jaxinfer.text.chat import encode_chat, render_chat
from jaxinfer.text.stream import StopMatch, StopMatcher, StreamDecoder
from jaxinfer.text.tokenizer import Tokenizer

__all__ = ["StopMatch", "StopMatcher", "StreamDecoder", "Tokenizer", "encode_chat", "render_chat"]
