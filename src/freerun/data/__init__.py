"""Text to tokens to "microbatch number n", which is a pure function of the seed and n.

`build` makes it all from a data config; nothing here remembers where training is.
"""

from freerun.data.arrays import tokenizer_of
from freerun.data.batches import Batch, Microbatches
from freerun.data.bpe import train_tokenizer
from freerun.data.build import Data, build
from freerun.data.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Data",
    "Microbatches",
    "StreamDecoder",
    "Tokenizer",
    "build",
    "load_tokenizer",
    "tokenizer_of",
    "train_tokenizer",
]
