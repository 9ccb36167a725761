"""Data: from what a spec names to token arrays. Reads, checks, splits, tokenises; knows nothing of training.

`load` takes files to checked and split text, `tokenise` text to arrays; `check_data` does both and gives all faults at
once. Readers of data frames are not used on purpose: they take words like NA for missing, and round long integers.
"""

from ranksearch.data.check import Checked, check_data
from ranksearch.data.dataset import Dataset, load
from ranksearch.data.prepared import Prepared, Split
from ranksearch.data.tokenise import tokenise
from ranksearch.data.tokenizer import check_own_code, load_tokenizer

__all__ = [
    "Checked",
    "Dataset",
    "Prepared",
    "Split",
    "check_data",
    "check_own_code",
    "load",
    "load_tokenizer",
    "tokenise",
]
