"""freerun: train language models across slow, uneven or distant machines without ever waiting for them."""

__version__ = "0.1.0"
